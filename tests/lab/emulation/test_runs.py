"""A run of an emulated draft's steps: the tokens of single steps, and their time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdist.lab.plan.hardware import find_gpu
from specdist.lab.plan.job import open_model
from specdist.lab.plan.roofline import Placement
from specdist.models.batch.flat import FlatBatch
from specdist.models.sizes.sizes import ModelSize
from specdist.sampling.branch_estimates import DraftDraws
from specdist.sampling.distributions import SamplingSettings
from specdist.sampling.random import Purpose, RandomKeys
from tests.lab.emulation.device import EmulatedDevice
from tests.lab.emulation.markov import PairSettings, markov_pair
from tests.lab.emulation.runner import EmulatedRunner, Pace

NUM_STEPS, NUM_ROWS = 4, 6


@pytest.fixture
def runner() -> EmulatedRunner:
    """Of a draft whose passes take their time already."""
    size: ModelSize
    size, dtype = open_model("--draft", "1b", "bfloat16")
    placement = Placement(model=size, gpu=find_gpu("h100-sxm", dtype), context_tokens=100)
    model = markov_pair(PairSettings(vocab_size=1024, acceptance=0.5, temperature=1.0)).draft
    return EmulatedRunner(model, Pace(placement), EmulatedDevice())


def batch_of(token_ids: torch.Tensor | np.ndarray, first: int) -> FlatBatch:
    slots = np.arange(NUM_ROWS)
    return FlatBatch(token_ids, slots, np.full(NUM_ROWS, first))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_run_draws_what_single_steps_draw_in_their_time(runner: EmulatedRunner, temperature: float) -> None:
    draws = DraftDraws(
        settings=SamplingSettings(temperature=temperature), vocab_size=1024, keeps_scores=True,
        keeps_features=True,
    )  # fmt: skip
    zeros = np.zeros(NUM_ROWS, np.int64)
    keys = [RandomKeys(np.arange(NUM_ROWS), zeros + 101 + step, zeros) for step in range(NUM_STEPS)]
    first = batch_of(np.arange(NUM_ROWS) * 7, 100)
    run = runner.runs.run(first, np.full(NUM_ROWS, NUM_STEPS), keys[0], draws)
    columns_DCA = run.columns_DCA.cpu()
    run_ns = sum(end - begin for begin, end in runner.runs._queue.passes)
    batch = first
    for step in range(NUM_STEPS):
        uniforms = keys[step].uniforms(Purpose.DRAFT) if temperature else None
        positions, streams = (
            torch.from_numpy(each) for each in (keys[step].positions_N, keys[step].stream_keys_N)
        )
        drawn = draws.draw(runner.forward(batch, np.arange(NUM_ROWS)), streams, positions, uniforms)
        assert drawn.features_3N is not None
        expected = torch.stack(
            [drawn.token_ids_N.double(), drawn.probabilities_N, *drawn.features_3N.double()]
        )
        assert torch.equal(columns_DCA[step], expected.cpu())
        assert torch.equal(run.scores_DSV[step].cpu(), drawn.scores_NV.cpu())
        batch = batch_of(drawn.token_ids_N, 101 + step)
    assert columns_DCA[:, 0].unique().numel() > NUM_ROWS
    single_ns = sum(end - begin for begin, end in runner.runs._queue.passes) - run_ns
    assert run_ns == pytest.approx(single_ns, rel=0.01)
