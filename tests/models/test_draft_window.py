"""Passes of a model with a window against transformers with a mask, and the pages that it takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.batch.flat import FlatBatch
from specdist.models.cache.draft_window import NUM_SINK_PAGES, DraftWindow, WindowPageTable
from specdist.models.cache.pages import PageUpdates
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.runner import ModelRunner
from specdist.sampling.random import Purpose, RandomKeys
from specdist.utils.ranges import arange_segments
from tests.engine.harness import paged_runner
from tests.models.families import VOCAB_SIZE, tiny_model
from tests.models.kernels import PlainKernel
from tests.models.tape import TapeCapturer
from tests.models.test_static_runs import TOLERANCE, draws

PAGE_SIZE, MAX_SEQ_LEN = 4, 72
WINDOW = DraftWindow.of_tokens(7, PAGE_SIZE)
# Of each slot: tokens of its prompt, and positions up to which it is run, pass by pass. The first prompt has
# a gap after its first page; the third is shorter than the window, and grows beyond it.
PROMPTS = np.array([30, 17, 5])
ENDS = np.array([[13, 0, 5], [30, 17, 6], [31, 21, 14], [36, 22, 15], [37, 29, 23], [45, 30, 24]])
WAYS = {
    "ragged": Acceleration(),
    "compiled": Acceleration(is_compiled=True),
    "static": Acceleration(is_static=True),
    "kernel": Acceleration(is_static=True, kernels=[PlainKernel()]),
}


def visible_QK(num_prompt_tokens: int) -> np.ndarray:
    """bool: which keys each query sees."""
    positions = np.arange(MAX_SEQ_LEN)
    pages = positions // PAGE_SIZE
    begin = max(NUM_SINK_PAGES, (num_prompt_tokens - 1) // PAGE_SIZE - WINDOW.num_pages)
    in_window = pages >= np.maximum(pages - WINDOW.num_pages, begin)[:, None]
    return (positions <= positions[:, None]) & ((pages < NUM_SINK_PAGES) | in_window)


def expected_logits(model: PreTrainedModel, token_ids: np.ndarray, num_prompt_tokens: int) -> Tensor:
    """[positions, V], by transformers."""
    mask = torch.zeros(MAX_SEQ_LEN, MAX_SEQ_LEN)
    mask.masked_fill_(~torch.from_numpy(visible_QK(num_prompt_tokens)), torch.finfo(torch.float32).min)
    with torch.inference_mode():
        return model(torch.from_numpy(token_ids)[None], attention_mask=mask[None, None]).logits[0]


@dataclass
class Rows:
    """Three sequences in a runner with a window."""

    runner: ModelRunner
    token_ids: np.ndarray

    @staticmethod
    def of(model: PreTrainedModel, acceleration: Acceleration, **branches: int) -> Rows:
        runner = paged_runner(model, acceleration)
        runner.allocate(
            num_pages=WINDOW.num_pool_pages(
                num_slots=3, num_reach_tokens=9, num_batched_tokens=40, max_seq_len=MAX_SEQ_LEN
            ),
            page_size=PAGE_SIZE,
            num_slots=3,
            max_seq_len=MAX_SEQ_LEN,
            window=WINDOW,
            **branches,
        )
        assert runner._cache is not None
        for memory in (*runner._cache.keys.values(), *runner._cache.values.values()):
            memory.fill_(torch.nan)
        # What the target does with its own pages is not the draft's.
        runner.update_pages(PageUpdates(*np.full((3, 1), 2)))
        return Rows(runner, np.random.default_rng(0).integers(2, VOCAB_SIZE, size=(3, MAX_SEQ_LEN)))

    @property
    def table(self) -> WindowPageTable:
        assert isinstance(self.runner.pages, WindowPageTable)
        return self.runner.pages

    def batch(self, begins: np.ndarray, ends: np.ndarray) -> FlatBatch:
        slots = np.repeat(np.arange(3), ends - begins)
        positions = np.repeat(begins, ends - begins) + arange_segments(ends - begins)
        is_run = np.array(
            [WINDOW.is_run(positions[[index]], PROMPTS[slot])[0] for index, slot in enumerate(slots)]
        )
        slots, positions = slots[is_run], positions[is_run]
        return FlatBatch(self.token_ids[slots, positions], slots, positions)

    def fill(self) -> None:
        """All but the last positions of :data:`ENDS`."""
        begins = np.zeros(3, np.int64)
        for ends in ENDS[:-1]:
            self.runner.forward(self.batch(begins, ends), [])
            self.table.keep_from(np.arange(3), np.maximum(ends - 1, 0))
            begins = ends


@pytest.mark.parametrize(("family", "way"), [*(("llama", way) for way in WAYS), ("gpt2", "ragged")])
def test_a_pass_sees_the_first_page_and_the_last_ones(family: str, way: str) -> None:
    """At true positions, whatever the passes that a sequence comes in. What has been given back is not read:
    it is overwritten with what is not a number."""
    model = tiny_model(family)
    rows = Rows.of(model, WAYS[way])
    expected = [expected_logits(model, rows.token_ids[slot], PROMPTS[slot]) for slot in range(3)]
    begins, num_compared = np.zeros(3, np.int64), 0
    for ends in ENDS:
        batch = rows.batch(begins, ends)
        found = rows.runner.forward(batch, np.arange(len(batch)))
        wanted = torch.stack(
            [expected[slot][at] for slot, at in zip(batch.slots_T, batch.positions_T, strict=True)]
        )
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)
        num_compared += len(batch)
        rows.table.keep_from(np.arange(3), np.maximum(ends - 1, 0))
        assert rows.runner._cache is not None
        for memory in (*rows.runner._cache.keys.values(), *rows.runner._cache.values.values()):
            memory[rows.table._free] = torch.nan
        begins = ends
    # Tokens between the first page of a prompt and what its end sees are never run: four pages, one, none.
    assert num_compared == ENDS[-1].sum() - 5 * PAGE_SIZE
    assert (visible_QK(30) != visible_QK(MAX_SEQ_LEN)).any()


def test_pages_are_given_back_and_are_enough_for_every_slot() -> None:
    rows = Rows.of(tiny_model("llama"), Acceleration())
    num_pages = rows.table.num_free_pages
    rows.fill()
    # Of each sequence the first page, two before that of its last token, and that one.
    assert num_pages - rows.table.num_free_pages == 3 * WINDOW.num_visible_pages
    rows.table.begin(np.array([1]))
    assert num_pages - rows.table.num_free_pages == 2 * WINDOW.num_visible_pages
    rows.table.begin(np.arange(3))
    assert rows.table.num_free_pages == num_pages and len(set(rows.table._free)) == num_pages


def test_branches_see_what_their_sequence_sees() -> None:
    """And what is adopted from one is the sequence's."""
    model = tiny_model("llama")
    rows = Rows.of(model, Acceleration(), num_branch_slots=3, max_branch_tokens=4)
    rows.fill()
    ends, slots, branches = ENDS[-2], np.arange(3), 3 + np.arange(3)
    rows.runner.open_branches(slots, branches, ends)
    own = rows.batch(ends, ends + 3)
    found = rows.runner.forward(FlatBatch(own.token_ids_T, own.slots_T + 3, own.positions_T), np.arange(9))
    expected = [expected_logits(model, rows.token_ids[slot], PROMPTS[slot]) for slot in range(3)]
    wanted = torch.cat([each[end : end + 3] for each, end in zip(expected, ends, strict=True)])
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)
    rows.runner.adopt_branches(branches, slots, ends, np.full(3, 3))
    found = rows.runner.forward(rows.batch(ends + 3, ends + 4), np.arange(3))
    wanted = torch.stack([each[end + 3] for each, end in zip(expected, ends, strict=True)])
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("rule", ["greedy", "rejection"])
def test_a_recorded_run_gives_what_single_steps_give(rule: str) -> None:
    """Its steps cross the ends of pages, at which another page leaves the window."""
    model, how, num_steps = tiny_model("llama"), draws(rule), np.array([8, 1, 6])
    recorded = Rows.of(model, Acceleration(is_static=True, capturer=TapeCapturer()))
    plain = Rows.of(model, Acceleration())
    for rows in (recorded, plain):
        rows.fill()
    ends = ENDS[-2]
    for seed in range(2):
        keys = RandomKeys(np.array([3, -5, 2**40 + seed]), ends + 2, np.array([0, 2, 1]))
        batch = recorded.batch(ends, ends + 2)
        assert recorded.runner.runs is not None
        run = recorded.runner.runs.run(batch, num_steps, keys, how)
        assert run is not None
        for slot in range(3):
            own = batch.slots_T == slot
            part = FlatBatch(np.asarray(batch.token_ids_T)[own], batch.slots_T[own], batch.positions_T[own])
            key = RandomKeys(*(each[slot : slot + 1] for each in (
                keys.stream_keys_N, keys.positions_N, keys.num_misses_N)))  # fmt: skip
            for step in range(num_steps[slot]):
                at = RandomKeys(key.stream_keys_N, key.positions_N + step, key.num_misses_N)
                drawn = how.draw(
                    plain.runner.forward(part, [len(part) - 1]),
                    torch.from_numpy(at.stream_keys_N),
                    torch.from_numpy(at.positions_N),
                    None if rule == "greedy" else at.uniforms(Purpose.DRAFT),
                )
                assert int(run.columns_DCA[step, 0, slot]) == int(drawn.token_ids_N[0]), (seed, slot, step)
                torch.testing.assert_close(
                    run.scores[step][slot], drawn.scores_NV[0], atol=TOLERANCE, rtol=TOLERANCE
                )
                part = FlatBatch(drawn.token_ids_N, part.slots_T[:1], part.positions_T[-1:] + 1)
