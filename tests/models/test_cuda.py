"""What only a GPU can show: graphs and pinned buffers themselves. Skipped where there is none."""

import copy
import logging

import pytest
import torch

from specdist.models.attention import expansion
from specdist.models.passes.acceleration import Acceleration
from tests.engine.harness import paged_runner
from tests.models.chunks import MIXED, STEPS, Ends, check_rows
from tests.models.families import FAMILIES, tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("schedule", [MIXED, STEPS], ids=["mixed", "steps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_passes_match_plain_forwards(
    family: str,
    dtype: torch.dtype,
    schedule: list[Ends],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With everything that is on by default; a graph that was given up is a failure here."""
    plain = tiny_model(family, initializer_range=0.05)
    runner = paged_runner(copy.deepcopy(plain).to(dtype), Acceleration.of(GPU), device=GPU)
    # float32: sums in another order; bfloat16: eight bits of mantissa through three layers.
    tolerance = 5e-4 if dtype == torch.float32 else 0.1
    with caplog.at_level(logging.WARNING):
        check_rows(plain, runner, schedule, page_size=16, tolerance=tolerance)
        if any(runner.windows.values()):
            # With pages of their own, in graphs of their own: of a runner with another cache.
            runner = paged_runner(copy.deepcopy(plain).to(dtype), Acceleration.of(GPU), device=GPU)
            check_rows(plain, runner, schedule, page_size=4, tolerance=tolerance, is_windowed=True)
        if any(rules.is_latent for rules in runner._shapes.rules.values()):
            monkeypatch.setattr(expansion, "OPERATIONS_PER_BYTE", 0)  # chunks of prompts expand latents
            runner = paged_runner(copy.deepcopy(plain).to(dtype), Acceleration.of(GPU), device=GPU)
            check_rows(plain, runner, schedule, page_size=16, tolerance=tolerance)
    assert "without graphs" not in caplog.text
