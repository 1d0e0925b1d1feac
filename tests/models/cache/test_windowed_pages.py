"""Which pages windowed layers hold, whom they are shared with, and what that saves."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from specdist.engine.assembly import PAGE_SIZE
from specdist.engine.schedule.plan import SchedulerSettings
from specdist.lab.plan.hardware import GPUS
from specdist.lab.plan.memory import fit
from specdist.models.cache.pages import PageTable
from specdist.models.cache.windowed_pages import NULL_PAGE, WindowedLayers, WindowedPages, longest_window
from specdist.models.sizes.sizes import model_size

SIZE, WINDOW = 4, 10
CONTEXT = list(range(40))


def table(num_windowed: int = 30, num_pages: int = 60) -> tuple[PageTable, WindowedPages]:
    layers = WindowedLayers(WINDOW, num_windowed)
    pages = PageTable(num_pages=num_pages, page_size=SIZE, num_slots=4, windowed=layers)
    assert pages.windowed is not None
    return pages, pages.windowed


def run(pages: PageTable, slot: int, begin: int, end: int) -> None:
    """As a scheduler has a chunk of a context run."""
    assert pages.extend(slot, end)
    pages.slide(slot, begin, end)
    pages.publish(slot, end)


def held(pages: PageTable, entries: dict[tuple[int, int], int], slot: int) -> list[int]:
    """The columns of a slot that the models' copies have windowed pages for."""
    updates = pages.drain_updates()
    for own, column, page in zip(*(each.tolist() for each in vars(updates).values()), strict=True):
        if page < 0:
            entries[own, column] = -1 - page
    return sorted(column for own, column in entries if own == slot and entries[own, column] != NULL_PAGE)


def test_a_page_is_held_as_long_as_the_next_token_sees_one_of_its_keys() -> None:
    pages, windowed = table()
    entries: dict[tuple[int, int], int] = {}
    pages.open(0, CONTEXT)
    run(pages, 0, 0, 13)
    assert held(pages, entries, 0) == [0, 1, 2, 3]
    # The token at 12 sees the keys from 3 on, and the one at 13 those from 4 on.
    run(pages, 0, 12, 14)
    assert held(pages, entries, 0) == [0, 1, 2, 3]
    run(pages, 0, 13, 17)
    assert held(pages, entries, 0) == [1, 2, 3, 4] and len(windowed._num_seeing) == 4
    run(pages, 0, 17, 40)
    assert held(pages, entries, 0) == [2, 3, 4, 5, 6, 7, 8, 9]
    pages.slide(0, 40, 40)
    assert held(pages, entries, 0) == [7, 8, 9]
    pages.close(0)
    assert len(windowed._num_seeing) == 0


def test_a_prefix_is_found_as_far_as_the_window_before_its_end_is_there() -> None:
    pages, windowed = table(num_windowed=8)
    entries: dict[tuple[int, int], int] = {}
    pages.open(0, CONTEXT)
    for begin in range(0, 40, 8):
        run(pages, 0, begin, begin + 8)
    # Seven pages: of the context's ten the last ones.
    assert [page in windowed for page in pages._slots[0].pages] == [False] * 3 + [True] * 7  # type: ignore[union-attr]
    # A token after page n sees three pages: prefixes of six pages and more are there.
    assert pages.open(1, CONTEXT[:29]) == 28
    assert held(pages, entries, 1) == [4, 5, 6]
    assert entries[1, 0] == entries[1, 3] == NULL_PAGE
    pages.close(0)
    pages.close(1)
    assert pages.open(2, CONTEXT[:21]) == 0
    # What is run again is found from then on, although the other is older.
    run(pages, 2, 0, 20)
    assert pages.open(3, CONTEXT[:21]) == 20
    pages.close(2)
    pages.close(3)
    assert len(windowed._num_seeing) == 0 and pages.num_available == pages.num_pages
    assert len(windowed._free) + len(windowed._unseen) == 7


def test_a_shared_window_is_held_until_no_sequence_sees_it() -> None:
    pages, windowed = table(num_windowed=13)
    pages.open(0, CONTEXT)
    run(pages, 0, 0, 40)
    assert pages.open(1, CONTEXT[:25]) == 24
    shared = pages._slots[1].pages[3:6]  # type: ignore[union-attr]
    pages.slide(0, 40, 40)
    pages.close(0)
    # All others are needed by another sequence.
    pages.open(2, [7] * 40)
    run(pages, 2, 0, 32)
    assert all(page in windowed for page in shared)
    # Its own new pages have nothing to do with those that it does not share.
    run(pages, 1, 24, 28)
    assert len(windowed._num_seeing) == 8 + 4
    with pytest.raises(AssertionError, match="fewer windowed pages"):
        pages.open(3, [8] * 8)
        run(pages, 3, 0, 4)


def settings(**limits: int) -> SchedulerSettings:
    defaults = {
        "max_num_seqs": 32, "max_num_batched_tokens": 2048, "max_draft_tokens": 8, "max_new_tokens": 8192,
        "max_seq_len": 8192, "seed": 0,
    }  # fmt: skip
    return SchedulerSettings(**(defaults | limits))


def test_only_windows_that_save_pages_have_pages_of_their_own() -> None:
    assert longest_window([None, 16, 8192, 1024], 8192) == 1024
    assert longest_window([None, 8192], 8192) is None
    found = settings().windowed_layers(1024, PAGE_SIZE)
    # Of each sequence the window, what a round may write, and pages that are partly used.
    assert found is not None and 32 * 66 < found.num_pages < 32 * 71 + 2 * 128
    assert settings().windowed_layers(8000, PAGE_SIZE) is None
    assert settings(max_num_seqs=1, max_seq_len=2048).windowed_layers(1024, PAGE_SIZE) is None


# As published.
GEMMA_3 = {
    "vocab_size": 262_208, "hidden_size": 5376, "intermediate_size": 21_504, "num_hidden_layers": 62,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
    "max_position_embeddings": 131_072,
}  # fmt: skip


def test_bytes_of_a_sequence_of_8192_tokens_with_and_without_windows() -> None:
    """What the planner says, against a count by hand: of a token in one layer, layers with all tokens, and
    with a window of so many."""
    token_bytes, num_whole, num_windowed, window = 2 * 2 * 16 * 128, 10, 52, 1024
    size = model_size("gemma3_text", AutoConfig.for_model("gemma3_text", **GEMMA_3), 2)
    share = fit(size, None, GPUS["h200"], "target only", tp_size=1, row_tokens=8192).target
    whole = 8192 * token_bytes * (num_whole + num_windowed)
    least = token_bytes * (8192 * num_whole + window * num_windowed)
    # Partly used pages, and a batch's chunks.
    assert least < share.cache_bytes_per_row < 1.25 * least < whole
    assert share.most_rows > 1.2 * (share.usable_bytes - share.weight_bytes) // whole
