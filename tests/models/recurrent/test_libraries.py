"""Functions of other libraries are used for long chunks where they are right."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdist.models.passes.acceleration import Acceleration
from specdist.models.recurrent import convolution, gated_delta, libraries, mamba2
from specdist.models.recurrent.rollback import Rollback
from tests.models.recurrent import fake_libraries
from tests.models.recurrent.fake_libraries import ASKED, causal_conv1d_fn, install
from tests.models.recurrent.test_recorded import NUM_SLOTS, runner_of, tokens_of
from tests.models.recurrent.twins import use_twins

CPU = torch.device("cpu")
# Not cached: other libraries are there in every test.
TRIED: dict[str, Callable[[torch.dtype], Any]] = {
    "chunk_gated_delta_rule": lambda dtype: libraries.delta_rule_on.__wrapped__(CPU, dtype, False),
    "chunk_kda": lambda dtype: libraries.delta_rule_on.__wrapped__(CPU, dtype, True),
    "mamba_chunk_scan_combined": lambda dtype: libraries.mamba2_on.__wrapped__(CPU, dtype),
    "causal_conv1d_fn": lambda dtype: libraries.tried_convolution.__wrapped__(CPU, dtype),
}
FAMILIES = {
    "qwen3_5_text": "chunk_gated_delta_rule",
    "kimi_linear": "chunk_kda",
    "mamba2": "mamba_chunk_scan_combined",
}


@pytest.mark.parametrize("name", TRIED)
def test_what_is_right_is_used_and_what_is_wrong_or_missing_is_not(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert TRIED[name](torch.bfloat16) is None and "No module named" in caplog.messages[-1]
    install(monkeypatch)
    for dtype in (torch.float32, torch.bfloat16):
        assert TRIED[name](dtype) is not None
        assert caplog.messages[-1].endswith(name)
    right = getattr(fake_libraries, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        found = right(*args, **kwargs)
        if isinstance(found, Tensor):
            return found.roll(1, -1)
        return (found[0], found[1] * 1.1) if wrong == "states" else (found[0].roll(1, 1), found[1])

    for wrong in ("outputs", "states")[: 1 if name == "causal_conv1d_fn" else 2]:
        install(monkeypatch, **{name: functools.wraps(right)(changed)})
        assert TRIED[name](torch.bfloat16) is None
        assert f"not used: {name}: {wrong} differ by" in caplog.messages[-1]


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_long_chunks_by_a_library_leave_what_blocks_go_on_from(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of several sequences beside a block; then of tokens that may still be taken back some are."""
    use_twins(monkeypatch)
    install(monkeypatch)
    plain, found = (runner_of(family, Acceleration(), Rollback(9)) for _ in range(2))
    found_by = FAMILIES[family]
    of_library = TRIED[found_by](torch.float32)
    begins = np.zeros(NUM_SLOTS, int)
    for place, (lengths, num_back) in enumerate((([160, 5, 3], 0), ([1, 170, 4], 3), ([200, 2, 9], 5))):
        begins = np.maximum(0, begins - num_back)
        batch = tokens_of(np.arange(NUM_SLOTS), begins, np.array(lengths), place)
        logits = []
        for runner, library, convolves in ((plain, None, None), (found, of_library, causal_conv1d_fn)):
            ASKED.clear()
            with monkeypatch.context() as patched:
                patched.setattr(gated_delta, "delta_rule_on", lambda *asked, library=library: library)
                patched.setattr(mamba2, "mamba2_on", lambda *asked, library=library: library)
                patched.setattr(convolution, "convolution_on", lambda *asked, found=convolves: found)
                logits.append(runner.forward(batch, np.arange(len(batch))))
            assert bool(ASKED[found_by]) == (runner is found)
        num_layers = len(found._shapes.states)
        assert ASKED[found_by] == num_layers
        assert ASKED["causal_conv1d_fn"] in (0, num_layers), "widths that it takes, or not"
        torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
        own, others = found.cache.states, plain.cache.states
        assert own is not None and others is not None
        for layer, held in others.states.items():
            assert (own.states[layer] - held).abs().max() < 1e-4 * held.abs().max()
        begins = begins + lengths
