"""Recorded passes of models with recurrent layers against passes that are not, whatever is accepted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from specdist.models.batch.flat import FlatBatch
from specdist.models.cache.pages import PageUpdates
from specdist.models.cache.prefix_states import Rollback
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.runner import ModelRunner
from specdist.utils.ranges import arange_segments
from tests.engine.harness import paged_runner
from tests.models.all_families import build
from tests.models.families import VOCAB_SIZE, remember_longer
from tests.models.recurrent.twins import use_twins
from tests.models.tape import TapeCapturer

FAMILIES = ("qwen3_5_text", "kimi_linear", "lfm2", "mamba2", "jamba")
NUM_SLOTS, MOST_DRAFTED, NUM_PROMPT, NUM_ROUNDS, PAGE_SIZE, LENGTH = 3, 8, 20, 16, 4, 512
# Sums in another order, of logits of about 1.
TOLERANCE = 1e-4


def runner_of(family: str, acceleration: Acceleration, rollback: Rollback) -> ModelRunner:
    torch.manual_seed(0)
    model = build(family)
    remember_longer(model)
    runner = paged_runner(model, acceleration)
    width = LENGTH // PAGE_SIZE
    runner.allocate(
        num_pages=NUM_SLOTS * width,
        page_size=PAGE_SIZE,
        num_slots=NUM_SLOTS,
        max_seq_len=LENGTH,
        rollback=rollback,
    )
    slots, pages = np.repeat(np.arange(NUM_SLOTS), width), np.arange(NUM_SLOTS * width)
    runner.update_pages(PageUpdates(slots, pages % width, pages))
    return runner


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_passes_are_right_for_every_acceptance(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 1 to 9 tokens, none of whose candidates are accepted, or some, or all: of a target, which
    follows what was committed, and of a draft, whose passes may go back by a block."""
    use_twins(monkeypatch)
    generator, capturer = np.random.default_rng(1), TapeCapturer()
    rollback = Rollback(MOST_DRAFTED + 1, follows_committed=family in FAMILIES[::2])
    recorded = runner_of(family, Acceleration(is_static=True, capturer=capturer), rollback)
    plain = runner_of(family, Acceleration(), rollback)
    ends, seen = np.zeros(NUM_SLOTS, int), set()
    for place in range(NUM_ROUNDS):
        slots = generator.permutation(NUM_SLOTS)[: generator.integers(1, NUM_SLOTS + 1)]
        lengths = generator.integers(1, MOST_DRAFTED + 2, len(slots))
        if place in (0, NUM_ROUNDS // 2):  # other sequences come into the slots
            slots, ends[:] = np.arange(NUM_SLOTS), 0
            lengths = NUM_PROMPT + np.arange(NUM_SLOTS)
        found, wanted = (_logits(runner, slots, ends, lengths, place) for runner in (recorded, plain))
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)
        accepted = generator.integers(0, lengths)
        ends[slots] += lengths if place in (0, NUM_ROUNDS // 2) else 1 + accepted
        seen |= {"none" for one in accepted if not one} | {"all" for one in lengths - accepted if one == 1}
    assert seen == {"none", "all"} and capturer.num_captures >= 5
    assert capturer.num_replays == NUM_ROUNDS + capturer.num_captures
    own, others = recorded.cache.states, plain.cache.states
    assert own is not None and others is not None
    for layer, held in others.states.items():
        difference = (own.states[layer] - held).abs().max()
        assert difference < 1e-5 * max(1.0, float(held.abs().max()))


def tokens_of(slots: np.ndarray, begins: np.ndarray, lengths: np.ndarray, seed: int) -> FlatBatch:
    slots_T = np.repeat(slots, lengths)
    positions_T = np.repeat(begins, lengths) + arange_segments(lengths)
    token_ids = np.random.default_rng(seed).integers(2, VOCAB_SIZE, size=len(slots_T))
    return FlatBatch(token_ids, slots_T, positions_T)


def _logits(
    runner: ModelRunner, slots: np.ndarray, ends: np.ndarray, lengths: np.ndarray, seed: int
) -> Tensor:
    """Of tokens that are others in every pass."""
    batch = tokens_of(slots, ends[slots], lengths, seed)
    return runner.forward(batch, np.arange(len(batch)))
