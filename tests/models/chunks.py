"""Rows that grow over passes in ragged chunks, and the logits that a plain forward per row gives for them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.batch.flat import FlatBatch
from specdist.models.cache.pages import PageTable
from specdist.models.cache.windowed_pages import NULL_PAGE, WindowedLayers, longest_window
from specdist.models.passes.runner import ModelRunner
from tests.models.families import VOCAB_SIZE

NUM_PAGES = 64
NUM_SLOTS = 5
MAX_SEQ_LEN = 80

# float32 sums in another order; the logits are of order 1 to 10.
TOLERANCE = 5e-5

Ends = dict[int, int]
# Whole prompts, verification blocks, single steps and later chunks, mixed; rows begin at different times.
MIXED: list[Ends] = [{4: 20, 0: 5}, {4: 21, 2: 60}, {4: 25, 0: 12, 2: 61, 1: 3}, {4: 41, 0: 23, 2: 70, 1: 9}]
# Two rows that grow past a window; each pass fits the same bucket, but for the number of logits.
STEPS: list[Ends] = [
    {0: 3, 2: 4}, {0: 7, 2: 7}, {0: 10, 2: 11}, {0: 14, 2: 12}, {0: 18, 2: 16}, {0: 21, 2: 20},
    {2: 24, 0: 22},
]  # fmt: skip


def check_rows(
    plain: PreTrainedModel,
    runner: ModelRunner,
    schedule: list[Ends] = MIXED,
    *,
    page_size: int = 4,
    tolerance: float = TOLERANCE,
    is_windowed: bool = False,
) -> None:
    """The runner's logits of every pass are those of plain forwards, row by row."""
    rows = GrowingRows(plain, schedule, page_size=page_size, is_windowed=is_windowed)
    for found, wanted in rows.run(runner):
        torch.testing.assert_close(found.float(), wanted.float(), atol=tolerance, rtol=tolerance)


def give_pages(runner: ModelRunner, rows: np.ndarray, *, page_size: int) -> None:
    """Allocate the runner's cache, and a slot with pages for each whole row [S, L]."""
    num_rows, length = rows.shape
    num_pages = num_rows * -(-length // page_size)
    runner.allocate(num_pages=num_pages, page_size=page_size, num_slots=num_rows, max_seq_len=length)
    pages = PageTable(num_pages=num_pages, page_size=page_size, num_slots=num_rows)
    for slot, token_ids in enumerate(rows.tolist()):
        pages.open(slot, token_ids)
        assert pages.extend(slot, length)
    runner.update_pages(pages.drain_updates())


class GrowingRows:
    """Feeds a runner the chunks of a schedule: per pass, the position up to which each slot's row is run.

    With ``is_windowed`` windowed layers have pages of their own, which are NaN once they are given back.
    """

    def __init__(
        self,
        plain: PreTrainedModel,
        schedule: list[Ends],
        *,
        page_size: int,
        seed: int = 0,
        is_windowed: bool = False,
    ) -> None:
        self._schedule = schedule
        self.page_size, self._is_windowed = page_size, is_windowed
        generator = np.random.default_rng(seed)
        slots = sorted({slot for ends in schedule for slot in ends})
        self._rows = {slot: generator.integers(2, VOCAB_SIZE, size=MAX_SEQ_LEN) for slot in slots}
        with torch.inference_mode():
            self._expected = {
                slot: plain(torch.as_tensor(token_ids)[None]).logits[0]
                for slot, token_ids in self._rows.items()
            }

    def run(self, runner: ModelRunner) -> Iterator[tuple[Tensor, Tensor]]:
        """Found and expected logits of every pass; every other one asks for the chunks' last tokens alone.

        Where no row has written yet the cache holds what another row could have left: NaN.
        """
        sizes = {"num_pages": NUM_PAGES, "page_size": self.page_size, "num_slots": NUM_SLOTS}
        windowed = None
        if self._is_windowed:
            window = longest_window(runner.windows.values(), MAX_SEQ_LEN)
            assert window is not None
            windowed = WindowedLayers(window, NUM_PAGES)
        runner.allocate(**sizes, max_seq_len=MAX_SEQ_LEN, windowed=windowed)
        self._fill(runner, slice(None))
        pages = PageTable(**sizes, windowed=windowed)
        done = dict.fromkeys(self._rows, 0)
        for number, ends in enumerate(self._schedule):
            for slot, end in ends.items():
                if done[slot] == 0:
                    pages.open(slot, self._rows[slot].tolist())
                assert pages.extend(slot, end)
                pages.slide(slot, done[slot], end)
            if pages.windowed is not None:
                self._fill(runner, pages.windowed._free)
            runner.update_pages(pages.drain_updates())
            lengths = np.array([end - done[slot] for slot, end in ends.items()])
            batch = FlatBatch(
                np.concatenate([self._rows[slot][done[slot] : end] for slot, end in ends.items()]),
                np.repeat(list(ends), lengths),
                np.concatenate([np.arange(done[slot], end) for slot, end in ends.items()]),
            )
            asked = np.arange(len(batch)) if number % 2 == 0 else lengths.cumsum() - 1
            wanted = torch.cat([self._expected[slot][done[slot] : end] for slot, end in ends.items()])
            yield runner.forward(batch, asked).cpu(), wanted[asked]
            done.update(ends)

    def _fill(self, runner: ModelRunner, windowed_pages: list[int] | slice) -> None:
        """These windowed pages with NaN, but for the one that nobody writes; all of others, where these are
        all."""
        cache = runner.cache.key_value
        for held in (cache.keys, cache.values, cache.key_scales, cache.value_scales):
            for layer, memory in held.items():
                if layer not in cache.windowed and not isinstance(windowed_pages, slice):
                    continue
                # The bits of numbers in 8 bits are those of NaN, too.
                wrong = torch.nan if memory.is_floating_point() else 0x7F
                memory[windowed_pages if layer in cache.windowed else slice(None)] = wrong
                if layer in cache.windowed:
                    memory[NULL_PAGE] = 0.0
