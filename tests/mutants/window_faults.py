"""Faults of layers that see a window: which keys they see, and their pages."""

from tests.mutants.mutant import Mutant

HELD = (
    "tests/models/cache/test_windowed_pages.py::"
    "test_a_page_is_held_as_long_as_the_next_token_sees_one_of_its_keys"
)
PREFIX = (
    "tests/models/cache/test_windowed_pages.py::"
    "test_a_prefix_is_found_as_far_as_the_window_before_its_end_is_there"
)
WINDOWED = (
    "tests/engine/test_windowed_pages.py::"
    "test_windows_hold_what_is_seen_in_any_batch_chunked_preempted_and_shared"
)
READ = "tests/models/test_windowed_pages.py::test_logits_are_those_of_plain_forwards"
HOST = "tests/models/test_windowed_pages.py::test_a_host_reads_no_pages_before_a_window"

WINDOW_FAULTS = (
    Mutant("windows-for-all-whatever-memory-holds", "_with_windows",
        "best, most = tried, of_own",
        "pass",
        ("tests/job/test_rank_allocation.py",)),
    Mutant("segments-begin-at-one-page", "AttentionGroup._from",
        "firsts_R[:, None] + np.arange(num_pages)",
        "firsts_R.min() + np.arange(num_pages)[None].repeat(len(firsts_R), 0)",
        (HOST,)),
    Mutant("windowed-page-given-back-one-token-too-early", "WindowedPages._first_seen",
        "max(0, position - self._window + 1)",
        "max(0, position - self._window + 2)",
        (HELD, WINDOWED), is_dangerous=True),
    Mutant("prefix-whose-windowed-pages-are-gone-is-found", "WindowedPages.num_usable",
        "num_there = num_there + 1 if page in self._beside else 0",
        "num_there += 1",
        (PREFIX,)),
    Mutant("windowed-page-of-a-prefix-is-another-s", "WindowedPages._new_page",
        "self.forget(next(iter(self._unseen)))",
        "return self._beside[next(iter(self._unseen))]",
        (PREFIX, WINDOWED)),
    Mutant("what-was-given-back-is-still-in-the-table", "WindowedPages.slide",
        "            self._on_change(slot, column, NULL_PAGE)\n",
        "",
        (READ,)),
    Mutant("windowed-layers-read-pages-of-the-others", "GroupedAttention._of",
        "if layer in self._windowed",
        "if layer not in self._windowed",
        (READ,)),
    Mutant("compiled-layers-read-pages-of-the-others", "CompiledPass.bind",
        "layer.group = int(index in cache.windowed)",
        "layer.group = 0",
        ("tests/models/test_windowed_pages.py::test_compiled_layers_read_their_own_pages",)),
    Mutant("draft-gets-the-target-s-windowed-pages", "Scheduler.updates_of_draft",
        "if self._pages.windowed is None and self._pages.states is None:",
        "if True:",
        (WINDOWED,)),
    Mutant("collecting-from-a-cache-that-gives-back", "_collect",
        "may_give_back=False",
        "may_give_back=True",
        ("tests/training/collect/test_collect.py::"
         "test_a_target_whose_layers_have_windows_runs_texts_that_are_longer",)),
)  # fmt: skip
