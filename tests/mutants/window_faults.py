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
    Mutant(
        name="window-at-places-among-visible-keys-in-the-model",
        file="models/flat.py",
        old="return self.true_positions_T",
        new="return self.positions_T",
        tests=(SEEN,),
    ),
    Mutant(
        name="window-of-the-last-token-for-the-whole-segment",
        file="cache/draft_window.py",
        old="is_first_T[1:] = (slots_T[1:] != slots_T[:-1]) | (hidden_T[1:] != hidden_T[:-1])",
        new="is_first_T[1:] = slots_T[1:] != slots_T[:-1]",
        tests=(SEEN,),
    ),
    Mutant(
        name="window-forgets-where-a-sequence-began",
        file="cache/draft_window.py",
        old="self._begins[slot] = self._firsts[slot] = self._ends[slot] = first",
        new="self._firsts[slot] = self._ends[slot] = first",
        tests=(SEEN,),
    ),
    Mutant(
        name="window-gives-back-a-page-that-is-still-seen",
        file="cache/draft_window.py",
        old="visible_S = np.maximum(positions_S // self._page_size - self._window.num_pages, self._begins[slots_S])",
        new="visible_S = np.maximum(positions_S // self._page_size - self._window.num_pages + 1, self._begins[slots_S])",
        tests=(SEEN,),
    ),
    Mutant(
        name="window-gives-nothing-back",
        file="engine/draft_worker.py",
        old="positions = np.minimum(state.num_computed[slots], state.num_committed[slots] - 1)",
        new="positions = state.num_computed[slots] * 0",
        tests=(BATCH,),
    ),
    Mutant(
        name="window-gives-nothing-back-in-rounds-alone",
        file="engine/draft_worker.py",
        old="            self._ahead.follow(request)\n            self._keep(request.slots_R)\n",
        new="            self._ahead.follow(request)\n",
        tests=("tests/engine/test_draft_window.py::test_rounds_alone_hold_no_more_pages_than_others",),
    ),
    Mutant(
        name="window-keeps-the-first-page-of-the-last-sequence",
        file="cache/draft_window.py",
        old="self._give_back(slot, 0, self._num_sinks[slot])",
        new="pass",
        tests=(GIVEN_BACK,),
    ),
    Mutant(
        name="what-a-window-adopts-is-written-nowhere",
        file="cache/draft_window.py",
        old="self.reserve(slots_B, begins_B, begins_B + lengths_B)",
        new="pass",
        tests=(BRANCHES,),
    ),
    Mutant(
        name="steps-of-a-run-with-the-first-ones-window",
        file="models/static_runs.py",
        old="block_table_SP=inputs.tables[step - 1] if self._has_window else table_SP,",
        new="block_table_SP=inputs.tables[0] if self._has_window else table_SP,",
        tests=(RUN,),
    ),
    Mutant(
        name="window-without-what-a-shared-prefix-holds",
        file="engine/blocks.py",
        old="is_first = chunk.begin == sequence.num_shared",
        new="is_first = False",
        tests=(BATCH,),
    ),
    Mutant(
        name="window-of-a-resumed-sequence-begins-elsewhere",
        file="engine/blocks.py",
        old="window.is_run(whole.positions_T, sequence.num_prompt_tokens)",
        new="window.is_run(whole.positions_T, sequence.context_length)",
        tests=(RESUMED,),
    ),
)
