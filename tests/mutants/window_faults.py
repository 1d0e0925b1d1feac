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

WINDOW_FAULTS = (
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
        "is_first = begin == sequence.num_shared",
        "is_first = False",
        (BATCH,)),
    Mutant("window-of-a-resumed-sequence-begins-elsewhere", "flat_context",
        "window.is_run(whole.positions_T, sequence.num_prompt_tokens)",
        "window.is_run(whole.positions_T, sequence.context_length)",
        (RESUMED,)),
)
