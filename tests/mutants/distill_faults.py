"""Faults in distillation, and in runs whose draft changes on its way."""

from tests.mutants.mutant import Mutant

ACCEPTANCE, LOSSES = "tests/distillation/test_acceptance.py", "tests/learning/test_losses.py"
JOB, SEGMENTS = "tests/distillation/test_distill.py", "tests/data/test_segments.py"
RESUMED = f"{JOB}::test_an_interrupted_training_ends_with_the_same_weights"
PROMPTS = f"{JOB}::test_prompts_of_all_rows_but_those_held_out_are_learned_from"
ANEW = f"{JOB}::test_the_draft_goes_on_with_the_prompts_anew_after_every_evaluation"
OWN_TEXTS = "tests/distillation/test_own_texts.py"
RANKS = "tests/distillation/test_ranks.py"

DISTILL_FAULTS = (
    Mutant(
        name="acceptance-of-the-draft-s-own-mass-alone",
        file="learning/acceptance.py",
        old="torch.minimum(draft.probabilities_NV, target.probabilities_NV).sum(1)",
        new="torch.maximum(draft.probabilities_NV, target.probabilities_NV).sum(1)",
        tests=(f"{ACCEPTANCE}::test_with_rejection_the_targets_tokens_alone_give_the_common_mass",),
    ),
    Mutant(
        name="blocks-reach-into-the-next-completion",
        file="learning/acceptance.py",
        old="np.pad(each, (0, MAX_DRAFT_TOKENS))",
        new="np.pad(each, (0, MAX_DRAFT_TOKENS), constant_values=1)",
        tests=(f"{ACCEPTANCE}::test_accepted_tokens_in_a_row_promise_more_than_scattered_ones",),
    ),
    Mutant(
        name="tvd-rewards-what-the-draft-has-too-much-of",
        file="learning/losses.py",
        old="(target_logs_MV > logs_MV)",
        new="(target_logs_MV < logs_MV)",
        tests=(f"{LOSSES}::test_the_target_itself_is_where_a_loss_is_smallest[tvd]",),
    ),
    Mutant(
        name="what-is-not-recorded-is-forgotten",
        file="learning/losses.py",
        old="return torch.cat([logs_MK, rest_M1.log()], 1)",
        new="return logs_MK.log_softmax(1)",
        tests=(f"{LOSSES}::test_mass_on_what_is_not_recorded_costs",),
    ),
    Mutant(
        name="prompts-of-held-out-rows-are-learned-from",
        file="distillation/data.py",
        old="if row_id not in not_learned]",
        new="if row_id >= 0]",
        tests=(PROMPTS,),
    ),
    Mutant(
        name="of-a-training-the-evaluation-that-was-lucky",
        file="distillation/training.py",
        old="<= highest.error_beside(found)",
        new="<= 0",
        tests=(f"{ACCEPTANCE}::test_the_best_evaluation_is_the_latest_within_an_error_of_the_highest",),
    ),
    Mutant(
        name="evaluations-differ-by-as-much-as-each-is-uncertain",
        file="distillation/training.py",
        old="<= highest.error_beside(found)",
        new="<= highest.error",
        tests=(f"{ACCEPTANCE}::test_the_best_evaluation_is_the_latest_within_an_error_of_the_highest",),
    ),
    Mutant(
        name="a-draft-reads-the-padding-before-its-prompt",
        file="distillation/own_texts.py",
        old="ids_BL[row, longest - len(ids) :], is_token_BL[row, longest - len(ids) :] = ids, 1",
        new="ids_BL[row, longest - len(ids) :], is_token_BL[row] = ids, 1",
        tests=(f"{OWN_TEXTS}::test_every_prompt_goes_on_as_it_would_alone",),
    ),
    Mutant(
        name="a-draft-s-text-goes-on-after-its-end",
        file="distillation/own_texts.py",
        old="if token_id in end_ids:",
        new="if token_id in ():",
        tests=(f"{OWN_TEXTS}::test_a_text_ends_with_the_draft_s_end_and_before_an_unknown_token",),
    ),
    Mutant(
        name="every-step-draws-the-same-texts",
        file="distillation/own_texts.py",
        old="[writer.seed, step, number]",
        new="[writer.seed, number]",
        tests=(f"{OWN_TEXTS}::test_the_same_step_of_a_training_has_the_same_texts",),
    ),
    Mutant(
        name="texts-are-written-once",
        file="distillation/training.py",
        old="if self._step == self._texts_end:",
        new="if not self._texts:",
        tests=(ANEW,),
    ),
    Mutant(
        name="texts-are-the-old-draft-s",
        file="distillation/run.py",
        old="model=student.module,",
        new='model=__import__("copy").deepcopy(student.module),',
        tests=(ANEW,),
    ),
    Mutant(
        name="a-resumed-training-learns-prompts-alone",
        file="distillation/training.py",
        old="self._texts_end = self._step\n",
        new="self._texts_end = self._step + (self._step > 0)\n",
        tests=(RESUMED,),
    ),
    Mutant(
        name="completions-drown-in-prompts",
        file="distillation/data.py",
        old="return self.training * times + self.prompts",
        new="return self.training + self.prompts",
        tests=(PROMPTS,),
    ),
    Mutant(
        name="distillation-resumes-without-the-optimizer",
        file="distillation/training.py",
        old='        self._optimizer.load_state_dict(found["optimizer"])\n',
        new="",
        tests=(RESUMED,),
    ),
    Mutant(
        name="distillation-resumes-a-training-with-other-options",
        file="distillation/training.py",
        old='if found["key"] != self._task.key:',
        new="if False:",
        tests=(RESUMED,),
    ),
    Mutant(
        name="every-rank-trains-on-its-own-rows-alone",
        file="distillation/training.py",
        old="        dist.all_reduce(flat)\n",
        new="",
        tests=(RANKS,),
    ),
    Mutant(
        name="held-out-rows-are-trained-on",
        file="distillation/data.py",
        old="[example for example in examples if example.row_id not in held_out]",
        new="list(examples)",
        tests=(f"{JOB}::test_a_distilled_draft_is_accepted_more_often",),
    ),
    Mutant(
        name="a-draft-changes-within-a-shard-under-rejection",
        file="data/segments.py",
        old="if rule == BETWEEN_SHARDS:",
        new="if False:",
        tests=(f"{SEGMENTS}::test_with_rejection_no_shard_has_rows_of_two_drafts",),
    ),
    Mutant(
        name="a-draft-changes-whatever-the-rule",
        file="data/segments.py",
        old="if is_latest or rule == NEVER or",
        new="if is_latest or",
        tests=(f"{SEGMENTS}::test_what_changes_tokens_is_refused",),
    ),
    Mutant(
        name="costs-of-the-former-draft-are-kept",
        file="data/segments.py",
        old='INFO_OF_DRAFT = ("draft", "flops_per_token", "costs")',
        new='INFO_OF_DRAFT = ("draft", "flops_per_token")',
        tests=(f"{SEGMENTS}::test_the_next_draft_is_recorded_and_its_costs_are_measured_anew",),
    ),
    Mutant(
        name="the-first-rows-are-half-a-shard",
        file="data/manifest.py",
        old="min(self.num_rows, num_shards * self.rows_per_shard)",
        new="math.ceil(share * self.num_rows)",
        tests=("tests/data/test_manifest.py::test_the_first_rows_are_whole_shards",),
    ),
)  # fmt: skip
