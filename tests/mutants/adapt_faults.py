"""Faults in a draft that learns on the way."""

from tests.mutants.mutant import Mutant

WORKER, SPARE = "tests/engine/test_adapting.py", "tests/engine/test_spare_time.py"
LEARNING, PIECES = "tests/learning/test_adaptation.py", "tests/learning/test_pieces.py"
JOB = "tests/job/test_adaptation.py"
TAKES_OVER = f"{LEARNING}::test_a_copy_that_drafts_more_takes_over"
WORSE = f"{LEARNING}::test_a_copy_that_drafts_less_does_not_and_goes_back"
GRADIENTS = f"{PIECES}::test_gradients_of_a_chunk_are_autograds[llama]"
ROWS = f"{WORKER}::test_the_rows_that_are_learned_from_are_the_target_s"
REPLICAS = f"{JOB}::test_of_replicas_the_draft_that_has_learned_most_is_kept"
KEPT = f"{JOB}::test_the_draft_that_took_over_is_there_after_a_kill"

ADAPT_FAULTS = (
    Mutant(
        name="draft-replaced-in-the-middle-of-a-round",
        file="engine/adapting.py",
        old="        if not self._may_learn:\n",
        new="        if not self._may_learn and self._stream is not None:\n",
        tests=(f"{WORKER}::test_nothing_is_learned_between_a_message_and_what_belongs_to_it",),
    ),
    Mutant(
        name="residual-of-the-draft-as-it-is-now",
        file="engine/draft_worker.py",
        old="Dense(state.scores.at(slots_W, np.where(is_rejected_R[drawn], positions_W, NOWHERE)))",
        new="Dense(state.scores.at(slots_W, np.where(is_rejected_R[drawn], positions_W - 1, NOWHERE)))",
        tests=(f"{WORKER}::test_under_rejection_the_distribution_is_the_target_s[none]",),
    ),
    Mutant(
        name="a-worse-copy-takes-over",
        file="learning/adaptation.py",
        old="return self.of_copy - self.of_draft > (",
        new="return self.of_copy - self.of_draft < (",
        tests=(WORSE, f"{LEARNING}::test_a_better_copy_is_better_by_the_margin_and_not_by_chance"),
    ),
    Mutant(
        name="a-copy-takes-over-by-chance",
        file="learning/adaptation.py",
        old="max(margin, SURE * self.error)",
        new="margin",
        tests=(f"{LEARNING}::test_a_better_copy_is_better_by_the_margin_and_not_by_chance",),
    ),
    Mutant(
        name="draft-judged-with-the-copy-s-weights",
        file="learning/adaptation.py",
        old="self._draft = PiecewiseModel(model, served.weights)",
        new="self._draft = PiecewiseModel(model)",
        tests=(TAKES_OVER,),
    ),
    Mutant(
        name="a-copy-that-went-astray-never-goes-back",
        file="learning/adaptation.py",
        old="            weight.copy_(self._served.weights[name])\n",
        new="            pass\n",
        tests=(WORSE,),
    ),
    Mutant(
        name="judged-on-rows-that-were-trained-on",
        file="learning/rows.py",
        old="random.integers(self.num_training)",
        new="random.integers(len(self._rows))",
        tests=(f"{LEARNING}::test_the_latest_rows_judge_and_the_oldest_go_first",),
    ),
    Mutant(
        name="a-busy-keeper-is-not-waited-for",
        file="learning/adaptation.py",
        old="if self._keeper is not None and not self._keeper.may_switch():",
        new="if self._keeper is not None and self._keeper.may_switch() is None:",
        tests=(f"{LEARNING}::test_any_copy_takes_over_with_a_negative_margin_unless_its_keeper_is_busy",),
    ),
    Mutant(
        name="layers-backward-in-the-order-of-forward",
        file="learning/pieces.py",
        old="for given, hidden in reversed(run):",
        new="for given, hidden in run:",
        tests=(GRADIENTS,),
    ),
    Mutant(
        name="compiled-pass-keeps-the-old-weights",
        file="models/compiled.py",
        old="        for fill in self._fills:\n            fill()\n",
        new="        for fill in self._fills[:1]:\n            fill()\n",
        tests=(f"{PIECES}::test_a_runner_s_new_weights_are_another_model_s[True]",),
    ),
    Mutant(
        name="preempted-rows-are-learned-from",
        file="engine/adapting.py",
        old="        self._num_prompt_tokens[suspended_slots] = 0\n",
        new="",
        tests=(ROWS,),
    ),
    Mutant(
        name="shared-prompts-are-learned-as-nothing",
        file="engine/adapting.py",
        old="        self._draft_state.put_undrafted(shared, opened.prefix_ids)\n",
        new="",
        tests=(ROWS,),
    ),
    Mutant(
        name="work-goes-on-when-a-message-is-due",
        file="engine/spare_time.py",
        old="waited + seconds <= self._due_s",
        new="waited <= self._due_s",
        tests=(f"{SPARE}::test_work_ends_before_a_message_is_due",),
    ),
    Mutant(
        name="a-piece-that-took-long-once-is-never-tried-again",
        file="engine/adapting.py",
        old="            self._seconds[self._next] *= FADING\n",
        new="            pass\n",
        tests=(f"{WORKER}::test_a_piece_that_took_long_once_is_tried_again",),
    ),
    Mutant(
        name="messages-that-waited-are-not-counted",
        file="engine/spare_time.py",
        old="late_s = now - came if is_late else 0.0",
        new="late_s = 0.0",
        tests=(f"{SPARE}::test_messages_that_had_to_wait_are_paid_back",),
    ),
    Mutant(
        name="relaunch-begins-with-the-first-draft",
        file="job/adaptation.py",
        old="            replace_weights(self._runner, weights)\n",
        new="",
        tests=(KEPT,),
    ),
    Mutant(
        name="another-draft-s-learning-is-taken-over",
        file="job/adaptation.py",
        old='if about["base"] != self._base:',
        new='if about["base"] is None:',
        tests=(f"{JOB}::test_a_draft_made_of_another_is_not_used_and_a_damaged_one_refused",),
    ),
    Mutant(
        name="a-replica-overwrites-what-another-has-learned",
        file="job/adaptation.py",
        old='if kept.get("num_steps", 0) > num_steps:',
        new='if kept.get("num_steps", 0) < 0:',
        tests=(REPLICAS,),
    ),
    Mutant(
        name="steps-of-earlier-starts-are-forgotten",
        file="job/adaptation.py",
        old='about["switches"], about.get("num_steps", 0)',
        new='about["switches"], 0',
        tests=(REPLICAS,),
    ),
    Mutant(
        name="what-was-learned-is-never-written",
        file="job/adaptation.py",
        old="            write_atomically(path, lambda file: file.write(content))\n",
        new="",
        tests=(f"{JOB}::test_a_killed_run_goes_on_with_what_was_learned_and_writes_the_same_rows",),
    ),
    Mutant(
        name="a-seed-s-tokens-promised-while-the-draft-changes",
        file="job/reproducibility.py",
        old="depends_on_batch |= config.adapt_draft",
        new="depends_on_batch |= False",
        tests=(f"{JOB}::test_under_rejection_only_the_distribution_is_the_seed_s",),
    ),
)
