"""Faults of a draft that sees a window alone: which keys it sees, and its pages."""

from tests.mutants.mutant import Mutant

PASSES = "tests/models/test_draft_window.py::"
SEEN = PASSES + "test_a_pass_sees_the_first_page_and_the_last_ones[llama-ragged]"
GIVEN_BACK = PASSES + "test_pages_are_given_back_and_are_enough_for_every_slot"
BRANCHES = PASSES + "test_branches_see_what_their_sequence_sees"
RUN = PASSES + "test_a_recorded_run_gives_what_single_steps_give[greedy]"
BATCH = (
    "tests/engine/test_draft_window.py::"
    "test_no_token_depends_on_the_batch_chunks_shared_prefixes_or_preemption[plain]"
)
RESUMED = "tests/engine/test_draft_window.py::test_a_resumed_sequence_sees_what_it_saw"
HELD = (
    "tests/models/cache/test_windowed_pages.py::"
    "test_a_page_is_held_as_long_as_the_next_token_sees_one_of_its_keys"
)
PREFIX = (
    "tests/models/cache/test_windowed_pages.py::"
    "test_a_prefix_is_found_as_far_as_the_window_before_its_end_is_there"
)
SIZES = "tests/models/cache/test_windowed_pages.py::test_only_windows_that_save_pages_have_pages_of_their_own"
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
    Mutant("host-reads-from-a-page-too-late", "AttentionGroup.seen",
        "self.positions_RQ[:, 0] - window + 1",
        "self.positions_RQ[:, -1] - window + 1",
        (HOST,)),
    Mutant("host-reads-all-pages", "AttentionGroup.seen",
        "is_whole = window is not None and not firsts_R.any()",
        "is_whole = window is not None",
        (HOST,)),
    Mutant("segments-begin-at-one-page", "AttentionGroup._from",
        "firsts_R[:, None] + np.arange(num_pages)",
        "firsts_R.min() + np.arange(num_pages)[None].repeat(len(firsts_R), 0)",
        (HOST,)),
    Mutant("window-at-places-among-visible-keys-in-the-model", "SeenBatch.model_positions_T",
        "return self.true_positions_T",
        "return self.positions_T",
        (SEEN,)),
    Mutant("window-of-the-last-token-for-the-whole-segment", "WindowPageTable.visible",
        "is_first_T[1:] = (slots_T[1:] != slots_T[:-1]) | (hidden_T[1:] != hidden_T[:-1])",
        "is_first_T[1:] = slots_T[1:] != slots_T[:-1]",
        (SEEN,)),
    Mutant("window-forgets-where-a-sequence-began", "WindowPageTable._take",
        "self._begins[slot] = self._firsts[slot] = self._ends[slot] = first",
        "self._firsts[slot] = self._ends[slot] = first",
        (SEEN,)),
    Mutant("window-gives-back-a-page-that-is-still-seen", "WindowPageTable.keep_from",
        "visible_S = np.maximum(positions_S // self._page_size - self._window.num_pages, self._begins[slots_S])",
        "visible_S = np.maximum(positions_S // self._page_size - self._window.num_pages + 1, self._begins[slots_S])",
        (SEEN,)),
    Mutant("window-gives-nothing-back", "DraftWorker._keep",
        "positions = np.minimum(state.num_computed[slots], state.num_committed[slots] - 1)",
        "positions = state.num_computed[slots] * 0",
        (BATCH,)),
    Mutant("window-gives-nothing-back-in-rounds-alone", "DraftWorker.follow",
        "            self._ahead.follow(request)\n            self._keep(request.slots_R)\n",
        "            self._ahead.follow(request)\n",
        ("tests/engine/test_draft_window.py::test_rounds_alone_hold_no_more_pages_than_others",)),
    Mutant("window-keeps-the-first-page-of-the-last-sequence", "WindowPageTable.begin",
        "self._give_back(slot, 0, self._num_sinks[slot])",
        "pass",
        (GIVEN_BACK,)),
    Mutant("what-a-window-adopts-is-written-nowhere", "WindowPageTable.adopt",
        "self.reserve(slots_B, begins_B, begins_B + lengths_B)",
        "pass",
        (BRANCHES,)),
    Mutant("steps-of-a-run-with-the-first-ones-window", "StaticRuns._compute",
        "block_table_SP=inputs.tables[step - 1] if self._has_window else table_SP,",
        "block_table_SP=inputs.tables[0] if self._has_window else table_SP,",
        (RUN,)),
    Mutant("window-without-what-a-shared-prefix-holds", "flat_context",
        "is_whole = begin == sequence.num_shared and",
        "is_whole = False and",
        (BATCH,)),
    Mutant("window-of-a-resumed-sequence-begins-elsewhere", "flat_context",
        "window.is_run(whole.positions_T, sequence.num_prompt_tokens)",
        "window.is_run(whole.positions_T, sequence.context_length)",
        (RESUMED,)),
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
    Mutant("windowed-page-that-another-sequence-sees-is-given-back", "WindowedPages._see",
        "self._num_seeing[page] += 1",
        "self._num_seeing[page] = 1",
        ("tests/models/cache/test_windowed_pages.py::test_a_shared_window_is_held_until_no_sequence_sees_it",)),
    Mutant("what-was-given-back-is-still-in-the-table", "WindowedPages.slide",
        "            self._on_change(slot, column, NULL_PAGE)\n",
        "",
        (READ,)),
    Mutant("windowed-layers-read-pages-of-the-others", "GroupedAttention.attend",
        "if layer in self._windowed",
        "if layer not in self._windowed",
        (READ,)),
    Mutant("static-pass-over-pages-of-the-others", "StaticPasses.pack",
        "(batch.windowed_pages_SP, self.windowed_scratch_page)",
        "(page_table, self.windowed_scratch_page)",
        (READ,)),
    Mutant("compiled-layers-read-pages-of-the-others", "CompiledPass.bind",
        "layer.group = int(index in cache.windowed)",
        "layer.group = 0",
        ("tests/models/test_windowed_pages.py::test_compiled_layers_read_their_own_pages",)),
    Mutant("draft-gets-the-target-s-windowed-pages", "Scheduler.updates_of_draft",
        "if not (self._pages.has_windowed or self._pages.has_states):",
        "if True:",
        (WINDOWED,)),
    Mutant("chunks-without-windowed-pages", "Scheduler._next_chunk",
        "        self._pages.slide(sequence.slot, begin, end)\n",
        "",
        (WINDOWED,)),
    Mutant("too-few-windowed-pages-for-a-batch", "num_pool_pages",
        "+ 2 * -(-num_batched_tokens // page_size)",
        "",
        (SIZES,)),
    Mutant("collecting-from-a-cache-that-gives-back", "_collect",
        "may_give_back=False",
        "may_give_back=True",
        ("tests/training/collect/test_collect.py::"
         "test_a_target_whose_layers_have_windows_runs_texts_that_are_longer",)),
)  # fmt: skip
