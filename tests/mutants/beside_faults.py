"""Faults in candidates from memory beside a draft model: the choice of the source, and which is which."""

from tests.mutants.mutant import Mutant

BESIDE = "tests/engine/test_memory_beside.py"
FOLLOWS = f"{BESIDE}::test_tokens_follow_the_target_s_distribution"
IN_TURNS, AHEAD, ANY = f"{FOLLOWS}[in_turns]", f"{FOLLOWS}[ahead]", f"{FOLLOWS}[any_shape]"

BATCH = f"{BESIDE}::test_tokens_depend_neither_on_the_batch_nor_on_preemptions[None]"
ASKED = f"{BESIDE}::test_where_the_model_pays_no_more_the_draft_is_asked_for_memory_alone"

BESIDE_FAULTS = (
    Mutant(
        name="parts-of-prompts-enter-the-index",
        file="engine/memory_beside.py",
        old="slots[are_whole & self._is_new[slots] & ~self._is_resumed[slots]]",
        new="slots[self._is_new[slots] & ~self._is_resumed[slots]]",
        tests=(f"{BESIDE}::test_prompts_are_looked_through_while_the_target_is_at_work[in_parts]",),
    ),
    Mutant(
        name="memory-beside-judged-with-the-model-s-probability",
        file="engine/draft_state.py",
        old="self.probabilities[places], self.is_forced[places] = 1, False",
        new="self.probabilities[places], self.is_forced[places] = 0.5, False",
        tests=(IN_TURNS, AHEAD),
    ),
    Mutant(
        name="model-s-tokens-judged-as-those-of-memory",
        file="engine/draft_worker.py",
        old="draft_probabilities_C=state.probabilities[places_C],",
        new="draft_probabilities_C=np.ones(len(places_C[0])),",
        tests=(ANY,),
    ),
    Mutant(
        name="residual-of-memory-beside-has-no-q",
        file="engine/draft_state.py",
        old="        self.scores.keep_certain(places, token_ids_T)\n",
        new="",
        tests=(IN_TURNS,),
    ),
    Mutant(
        name="model-s-tokens-are-certain",
        file="engine/draft_scores.py",
        old="certain = np.flatnonzero(steps_W == CERTAIN)",
        new="certain = np.flatnonzero(steps_W != NO_STEP)",
        tests=(IN_TURNS,),
    ),
    Mutant(
        name="certain-token-of-another-row",
        file="engine/draft_scores.py",
        old="scores_WV[upload(self._device, certain, lines_W[certain])] = certainty",
        new="scores_WV[upload(self._device, certain, np.roll(lines_W[certain], 1))] = certainty",
        tests=(AHEAD, ANY),
    ),
    Mutant(
        name="source-of-a-block-depends-on-other-sequences",
        file="drafters/source_choice.py",
        old="        if not self._settings.learns_together:\n",
        new="        if False:\n",
        tests=(BATCH,),
    ),
    Mutant(
        name="preempted-sequence-forgets-what-its-blocks-brought",
        file="engine/memory_beside.py",
        old="        self._histories.suspend(suspended, state.stream_keys[suspended])\n",
        new="",
        tests=(BATCH,),
    ),
    Mutant(
        name="memory-beside-of-a-preempted-sequence-is-another-ones",
        file="engine/memory_beside.py",
        old="        self._is_new[opened.slots] = True\n",
        new="",
        tests=(BATCH,),
    ),
    Mutant(
        name="blocks-of-memory-are-learned-from-as-the-model-s",
        file="engine/memory_beside.py",
        old="(num_ready_R > 0) & (state.num_from_memory[slots_R] == 0)",
        new="num_ready_R > 0",
        tests=(f"{BESIDE}::test_what_the_model_s_blocks_bring_is_learned_from_them_alone[in_turns]",),
    ),
    Mutant(
        name="memory-is-weighed-by-passes-alone",
        file="drafters/source_choice.py",
        old="ns += num_steps * costs.step_ns(num_rows, num_context) + costs.turns.at(num_rows)",
        new="pass",
        tests=("tests/drafters/test_source_choice.py",),
    ),
    Mutant(
        name="memory-beside-a-draft-of-fixed-length-is-not-weighed",
        file="config/generate.py",
        old="or needs_costs(self.policy) or self.weighs_memory",
        new="or needs_costs(self.policy)",
        tests=("tests/config/test_memory.py",),
    ),
    Mutant(
        name="listens-in-every-round-with-memory",
        file="engine/draft_ahead.py",
        old="self._num_quiet = self._num_quiet or self.shape.num_rounds_alone",
        new="pass",
        tests=(f"{ASKED}[0.0]",),
    ),
    Mutant(
        name="asked-in-every-round-though-memory-adds-nothing",
        file="engine/memory_beside.py",
        old="        return self._choice.is_worth_asking\n",
        new="        return True\n",
        tests=(f"{ASKED}[10.0]",),
    ),
    Mutant(
        name="memory-of-a-draft-with-a-window-lacks-tokens",
        file="engine/opened.py",
        old="token_ids[: None if has_window else each.num_shared]",
        new="token_ids[: each.num_shared]",
        tests=(f"{BESIDE}::test_memory_knows_all_of_a_text_of_which_the_draft_runs_a_part[2]",),
    ),
    Mutant(
        name="repeated-block-of-memory-is-a-new-one",
        file="drafters/source_choice.py",
        old="tokens_C = histories_RH[lines_C, NUM_BLOCK_NUMBERS + 1 + arange_segments(lengths_R)].astype(np.int64)",
        new="tokens_C = np.zeros(len(lines_C), np.int64)",
        tests=(f"{BESIDE}::test_a_preempted_sequence_repeats_its_block",),
    ),
    Mutant(
        name="memory-beside-lacks-shared-tokens",
        file="engine/memory_beside.py",
        old="        state.put_undrafted(shared, opened.prefix_ids)\n",
        new="",
        tests=(BATCH,),
    ),
)
