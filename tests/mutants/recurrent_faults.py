"""Faults in the states of recurrent layers and in their rollback."""

from tests.mutants.mutant import Mutant

STATES = "tests/models/recurrent/test_states.py::"
BLOCKS = STATES + "test_blocks_chunks_and_rollbacks_give_transformers_outputs"
BRANCH = STATES + "test_a_branch_has_the_state_of_its_sequence_and_gives_its_own_back"
DRIFT = STATES + "test_hundreds_of_rollbacks_leave_the_state_of_a_run_without_any"
WRONG_PLACE = STATES + "test_positions_that_a_state_does_not_lead_to_are_an_error"
RECORDED_TESTS = "tests/models/recurrent/test_recorded.py::"
RECORDED = RECORDED_TESTS + "test_recorded_passes_are_right_for_every_acceptance"
LONG = RECORDED_TESTS + "test_long_chunks_are_not_recorded"
RUNS = "tests/models/test_static_runs.py::test_a_run_gives_what_single_steps_give"
AHEAD = "tests/engine/test_recurrent.py::test_what_is_drafted_ahead_and_in_branches_has_the_state_of_its_place"
ADOPTED = "tests/engine/test_recurrent.py::test_an_adopted_branch_goes_on_with_its_own_state"
SIZES = "tests/models/test_sizes.py::test_states_and_keys_are_those_that_a_runner_holds"
KEPT = STATES + "test_a_sequence_goes_on_from_the_kept_state_of_its_prefix"
PREFIX_STATES = "tests/models/cache/test_prefix_states.py::"
PREFIXES = PREFIX_STATES + "test_random_prompts_begin_with_the_states_of_their_prefixes"
ONCE = PREFIX_STATES + "test_samples_run_their_prompt_once"
SKIPPING = "tests/engine/test_recurrent.py::test_a_draft_that_is_not_asked_in_every_round_has_its_own_states"
JOB = "tests/job/test_recurrent.py::test_rows_that_begin_alike_are_those_of_generate"

RECURRENT_FAULTS = (
    Mutant("state-with-a-token-too-few", "RecurrentStates._laid_out",
        "run_S + kept_S - begins_S,",
        "(run_S + kept_S - begins_S - 1).maximum(run_S + applied_S - begins_S),",
        (BLOCKS,)),
    Mutant("state-of-another-slot", "RecurrentStates._laid_out",
        "                slots_S,\n",
        "                slots_S.sort().values,\n",
        (BLOCKS,)),
    Mutant("sequences-begin-with-the-state-of-the-one-before", "RecurrentStates._laid_out",
        "applied_S == 0,",
        "applied_S < 0,",
        (BLOCKS,)),
    Mutant("recorded-passes-with-a-stale-number-of-applied-tokens", "pack_told",
        "told_5S[:, : len(told.slots_S)] = told",
        "told_5S[:, : len(told.slots_S)] = told._replace(applied_S=np.maximum(told.applied_S - 1, 0))",
        (RECORDED + "[mamba2]",)),
    Mutant("recording-leaves-states-several-times", "run_once",
        "each[-1].fill_(NOT_KEPT)",
        "pass",
        (RECORDED + "[qwen3_5_text]",)),
    Mutant("runs-go-on-from-the-state-before-them", "StaticRuns._pack_told",
        "positions = num_keys_A[rows] + step - 1",
        "positions = num_keys_A[rows]",
        (RUNS + "[greedy-falcon_h1-more6]",)),
    Mutant("a-lone-tokens-state-is-kept-without-its-length", "RecurrentStates.plan",
        "self._applied[slots_S], self._ends[slots_S] = kept_S, ends_S",
        "self._applied[slots_S], self._ends[slots_S] = np.where(lengths_S > 1, kept_S, applied_S), ends_S",
        (BLOCKS,)),
    Mutant("draft-tokens-are-in-the-state-at-once", "RecurrentStates.plan",
        "if self._rollback.follows_committed:",
        "if True:",
        (BRANCH, DRIFT)),
    Mutant("positions-behind-the-state-are-taken", "RecurrentStates.plan",
        "is_wrong_S = (begins_S < applied_S) |",
        "is_wrong_S =",
        (WRONG_PLACE,)),
    Mutant("branches-without-their-sequences-state", "ModelCache.open_branches",
        "self.states.copy(slots_B, branches_B)",
        "pass",
        (AHEAD,)),
    Mutant("adopted-branches-leave-the-state-behind", "ModelCache.adopt_branches",
        "self.states.copy(branches_B, slots_B)",
        "pass",
        (ADOPTED,)),
    Mutant("states-forgotten-in-the-size", "model_size",
        "states=StateSizes.of(model),",
        "",
        (SIZES,)),
    Mutant("prefixes-shared-without-their-state", "batch_limits",
        "target_keeps_states=models.target.keeps_states,",
        "",
        (JOB,)),
    Mutant("kept-states-are-those-of-another-border", "PrefixStates.keep",
        "own.keys[own.ends.pop(0) - 1]",
        "own.keys[own.ends.pop(0) - 2]",
        (PREFIXES,)),
    Mutant("kept-states-are-begun-with-before-they-are-there", "PrefixStates.keep",
        "self._new[key] = self._free.pop()",
        "self._new[key] = self._kept[key] = self._free.pop()",
        (PREFIXES,)),
    Mutant("draft-gets-the-target-s-kept-states", "Scheduler.updates_of_draft",
        "(updates.pages >= 0) & (updates.slots >= 0)",
        "updates.pages >= 0",
        (SKIPPING,)),
    Mutant("sequences-do-not-wait-for-their-prefix", "PrefixStates.may_begin",
        "if not coming.isdisjoint(own.keys[own.num_shared :]):",
        "if False:",
        (ONCE,)),
    Mutant("states-kept-before-the-pass", "RecurrentStates.update",
        "self._to_keep = np.array([slots, lengths, kept])[:, is_end]",
        "self._to_keep = self._to_keep[:, :0]; self.copy(slots[is_end], self._num_run + kept[is_end])",
        (KEPT,)),
)  # fmt: skip
