"""The job in bfloat16 on long prompts, sharded and beside a draft, where every token is known beforehand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specdist.cli import generate
from specdist.job.ranks import entry
from specdist.job.replica import loaded_models
from specdist.models.families import computed
from specdist.models.start_check.loading_check import LoadingCheck
from tests.job.copying import DISTANCE, build_copying_pair, known_completions
from tests.job.launching import read_output
from tests.job.ranks import fork_ranks

NUM_NEW_TOKENS = 40


@pytest.fixture(scope="module")
def copying(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    target, draft, prompts = build_copying_pair(tmp_path_factory.mktemp("copying"))
    return {
        "prompts": prompts,
        "target": target,
        "draft": draft,
        "device": "cpu",
        "dtype": "bfloat16",
        "temperature": 0,
        "max_new_tokens": NUM_NEW_TOKENS,
        "cache_memory": "256MiB",
    }


def expected(copying: dict[str, Any], output: Path) -> list[list[int]]:
    texts = read_output(output)["prompt"].to_pylist()
    return known_completions(copying["target"], texts, NUM_NEW_TOKENS, DISTANCE)


def completions(output: Path) -> list[list[int]]:
    found: list[list[int]] = read_output(output)["completion_ids"].to_pylist()
    return found


def into_converted_buffers(self: computed.ComputedTensors, model: nn.Module, device: torch.device) -> None:
    """The old fault: as in buffers that were converted to the model's precision."""
    dtype = next(model.parameters()).dtype
    for key, tensor in self._tensors.items():
        for place in self._places[key]:
            buffer = model.get_submodule(place.module)._buffers[place.name]
            buffer.copy_(tensor.to(dtype))  # type: ignore[union-attr]


def show_late(error: object, show: Callable[[object], None] = entry._show) -> None:
    time.sleep(1.0)
    show(error)


def generate_with_the_old_fault(arguments: Sequence[str] | None) -> int:
    # The other ranks, with the same error, do not end before rank 0 has shown it.
    entry._show = show_late
    computed.ComputedTensors.restore = into_converted_buffers  # type: ignore[method-assign]
    return generate(arguments)


def generate_unchecked(arguments: Sequence[str] | None) -> int:
    loaded_models.check_loading = lambda *_, **__: LoadingCheck(reason="left out")
    return generate_with_the_old_fault(arguments)


@pytest.mark.ranks
def test_two_ranks_and_a_draft_copy_from_far_back(copying: dict[str, Any], tmp_path: Path) -> None:
    ended = fork_ranks(3, **copying, tp_size=2, output=tmp_path / "run")
    assert ended.totals["exact"] is True
    assert completions(tmp_path / "run") == expected(copying, tmp_path / "run")
    # The draft errs on purpose: tokens were both accepted and rejected.
    assert 0.2 < ended.totals["draft_acceptance_rate"] < 1


@pytest.mark.ranks
def test_with_the_old_fault_the_job_does_not_begin(copying: dict[str, Any], tmp_path: Path) -> None:
    """With frequencies in bfloat16 the job once ended with 0 and claimed to be exact."""
    ended = fork_ranks(2, generate_with_the_old_fault, **copying, tp_size=2, output=tmp_path / "run")
    assert ended.code == 2, ended.stderr
    assert "layer 0 queries differ by" in ended.stderr and "Nothing was generated" in ended.stderr
    # Without the check it would have shown here: the test above can fail.
    output = tmp_path / "unchecked"
    ended = fork_ranks(2, generate_unchecked, **copying, tp_size=2, output=output)
    assert ended.totals["exact"] is False
    assert all(
        found != right for found, right in zip(completions(output), expected(copying, output), strict=True)
    )
