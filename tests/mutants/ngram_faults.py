"""Faults in candidates of n-grams: the lookup, their acceptance, and the token after a rejection."""

from tests.mutants.mutant import Mutant

NGRAMS = "tests/engine/test_ngram_draft.py"
PLAIN = f"{NGRAMS}::test_tokens_follow_the_target_s_distribution[plain]"
BATCH = f"{NGRAMS}::test_tokens_depend_neither_on_the_batch_nor_on_preemptions_nor_on_slices"
REPEATED = f"{NGRAMS}::test_a_text_that_repeats_itself_is_accepted_as_a_whole"
REPEATS_ITS_BLOCK = f"{NGRAMS}::test_a_preempted_sequence_repeats_its_block"
LOOKUP = "tests/policies/test_ngrams.py"

NGRAM_FAULTS = (
    Mutant("n-grams-judged-with-a-draft-models-probability", "NgramDraft.propose",
        "draft_probabilities_C=np.ones(num_candidates),",
        "draft_probabilities_C=np.full(num_candidates, 0.5),",
        (PLAIN,)),
    Mutant("residual-of-n-grams-keeps-the-candidate", "sample_alone",
        "RandomKeys(*keys_3W[:, rows]), Dense(draft_MV))",
        "RandomKeys(*keys_3W[:, rows]))",
        (PLAIN,), is_dangerous=True),
    Mutant("residual-of-n-grams-without-the-first-candidate-of-the-block", "NgramDraft._rejected_ids",
        "places_R = np.where(is_rejected_R, num_accepted_R, 0)",
        "places_R = np.where(is_rejected_R, 0, 0)",
        (PLAIN,)),
    Mutant("residual-of-n-grams-lacks-a-token-after-full-blocks-too", "NgramDraft._rejected_ids",
        "is_rejected_R = num_accepted_R < self._num_verified[slots_R]",
        "is_rejected_R = self._num_verified[slots_R] > 0",
        (PLAIN,)),
    Mutant("n-grams-of-the-last-sequence-in-a-slot", "NgramDraft._open",
        "self._lookup.num_tokens[slots] = self._num_found[slots] = self._num_verified[slots] = 0",
        "self._num_found[slots] = self._num_verified[slots] = 0",
        (BATCH,)),
    Mutant("n-grams-proposed-beyond-a-rows-end", "NgramDraft._find",
        "limits_R = np.where(is_end_R, 0, request.draft_now_R)",
        "limits_R = np.where(is_end_R, 0, request.draft_now_R * 0 + self._candidate_ids.shape[1])",
        (REPEATED, BATCH)),
    Mutant("n-grams-after-a-stop-token", "NgramDraft._find",
        "is_found_RK[:, 1:] &= ",
        "_ = is_found_RK[:, 1:] & ",
        (f"{NGRAMS}::test_nothing_is_proposed_after_a_stop_token",)),
    Mutant("lookup-finds-the-last-tokens-themselves", "PromptLookup.find",
        "is_earlier_P = places_P < last_R[rows_P]",
        "is_earlier_P = places_P <= last_R[rows_P]",
        (LOOKUP,)),
    Mutant("repeated-block-of-n-grams-has-another-length", "NgramDraft._find",
        "limits_R = np.where(is_resumed_R, np.minimum(request.num_redraft_R, limits_R), limits_R)",
        "pass",
        (REPEATS_ITS_BLOCK,)),
    Mutant("n-grams-are-not-learned-from", "NgramLengths.observe",
        "self._acceptance.observe(_features(matches_N[is_open_N]), is_right_N[is_open_N])",
        "pass",
        (LOOKUP,)),
)
