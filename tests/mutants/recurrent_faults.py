"""Faults in the states of recurrent layers and in their rollback."""

from tests.mutants.mutant import Mutant

STATES = "tests/models/recurrent/test_states.py::"
BLOCKS = STATES + "test_blocks_chunks_and_rollbacks_give_transformers_outputs"
BRANCH = STATES + "test_a_branch_has_the_state_of_its_sequence_and_gives_its_own_back"
DRIFT = STATES + "test_a_thousand_rollbacks_leave_the_state_of_a_run_without_any"
WRONG_PLACE = STATES + "test_positions_that_a_state_does_not_lead_to_are_an_error"
GREEDY = "tests/engine/test_recurrent.py::test_greedy_tokens_are_those_of_generate_after_every_block"
AHEAD = "tests/engine/test_recurrent.py::test_what_is_drafted_ahead_and_in_branches_has_the_state_of_its_place"
ADOPTED = "tests/engine/test_recurrent.py::test_an_adopted_branch_goes_on_with_its_own_state"
SIZES = "tests/models/test_sizes.py::test_states_and_keys_are_those_that_a_runner_holds"
JOB = "tests/job/test_recurrent.py::test_rows_that_begin_alike_are_those_of_generate"

RECURRENT_FAULTS = (
    Mutant("state-with-a-token-too-many", "RecurrentStates._group",
        "borders = num_carried + kept_S - begins_S",
        "borders = num_carried + kept_S - begins_S + 1",
        (BLOCKS,)),
    Mutant("state-with-a-token-too-few", "RecurrentStates._group",
        "borders = num_carried + kept_S - begins_S",
        "borders = np.maximum(num_carried + kept_S - begins_S - 1, 0)",
        (BLOCKS,)),
    Mutant("convolution-sees-a-token-too-few", "RecurrentStates._group",
        "np.maximum(applied_S - self.num_before, 0)",
        "np.maximum(applied_S - self.num_before + 1, 0)",
        (BLOCKS,)),
    Mutant("state-of-another-slot", "RecurrentStates._group",
        "slots_S=on_device(slots_S.astype(np.int64))",
        "slots_S=on_device(np.sort(slots_S).astype(np.int64))",
        (BLOCKS,)),
    Mutant("sequences-begin-with-the-state-of-the-one-before", "RecurrentStates._group",
        "is_first_S=on_device(begins_S == 0)",
        "is_first_S=on_device(begins_S < 0)",
        (BLOCKS,)),
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
    Mutant("branches-without-their-sequences-state", "ModelRunner.open_branches",
        "self._states.copy(slots_B, branches_B)",
        "pass",
        (AHEAD,)),
    Mutant("adopted-branches-leave-the-state-behind", "ModelRunner.adopt_branches",
        "self._states.copy(branches_B, slots_B)",
        "pass",
        (ADOPTED,)),
    Mutant("states-forgotten-in-the-size", "model_size",
        "states=StateSizes.of(model),",
        "",
        (SIZES,)),
    Mutant("prefixes-shared-without-their-state", "batch_limits",
        "not any(model.keeps_states for model in both)",
        "True",
        (JOB,)),
)  # fmt: skip
