"""Faults in distillation."""

from tests.mutants.mutant import Mutant

LEARNING = "tests/training/drafts/test_learning.py"
JOB = "tests/training/drafts/test_distill.py"
LEARNS = f"{JOB}::test_a_distilled_draft_is_accepted_more_often"
KILLED = f"{JOB}::test_a_killed_training_ends_with_the_same_weights"
ANEW = f"{JOB}::test_the_draft_writes_after_every_prompt_anew"
OWN_TEXTS = "tests/training/drafts/test_own_texts.py"

DISTILL_FAULTS = (
    Mutant("acceptance-of-the-draft-s-own-mass-alone", "acceptances",
        "torch.minimum(draft.probabilities_NV, target.probabilities_NV).sum(1)",
        "torch.maximum(draft.probabilities_NV, target.probabilities_NV).sum(1)",
        (f"{LEARNING}::test_with_rejection_the_targets_tokens_alone_give_the_common_mass",)),
    Mutant("what-is-not-recorded-is-forgotten", "_with_rest",
        "return torch.cat([logs_MK, rest_M1.log()], 1)",
        "return logs_MK.log_softmax(1)",
        (f"{LEARNING}::test_what_is_not_recorded_counts_as_one_token",)),
    Mutant("prompts-of-held-out-rows-are-learned-from", "read_examples",
        "if row_id not in held_out]",
        "if row_id >= 0]",
        (LEARNS,)),
    Mutant("a-draft-reads-the-padding-before-its-prompt", "with_own_texts",
        "attention_mask=(left_BL != IGNORED).long(),",
        "attention_mask=torch.ones_like(left_BL),",
        (f"{OWN_TEXTS}::test_every_prompt_goes_on_as_it_would_alone",)),
    Mutant("a-draft-s-text-goes-on-after-its-end", "with_own_texts",
        "(is_end_BN.cumsum(1) - is_end_BN + ",
        "(0 * is_end_BN + ",
        (f"{OWN_TEXTS}::test_a_text_ends_with_the_draft_s_end_and_before_an_unknown_token",)),
    Mutant("texts-are-the-old-draft-s", "DraftTrainer.compute_loss",
        "            self.model,\n",
        '            self.__dict__.setdefault("_old", __import__("copy").deepcopy(self.model)),\n',
        (ANEW,)),
    Mutant("a-checkpoint-that-was-cut-short-is-used", "_last_checkpoint",
        '            json.loads((path / "trainer_state.json").read_text())\n',
        "",
        (KILLED,)),
    Mutant("distillation-resumes-a-training-with-other-options", "_train",
        "if (checkpoints / KEY_NAME).is_file() and ",
        "if False and ",
        (KILLED,)),
    Mutant("eagle-draft-that-the-run-does-not-use-is-trained", "_open_start",
        "if found.drafter is not None:",
        "if not found.option:",
        (f"{JOB}::test_what_the_run_does_not_have_is_told",)),
)  # fmt: skip
