"""Faults in what shapes the distributions of single rows: penalties, biases, filters of their own."""

from tests.mutants.interplay_faults import ON_RANKS, RANDOM_RUNS
from tests.mutants.mutant import Mutant

PROCESSORS = "tests/sampling/test_processors.py::"
ALIKE = PROCESSORS + "test_a_processor_does_what_transformers_does"
ENGINE = "tests/engine/test_processing.py::"
FOLLOWS = ENGINE + "test_processed_tokens_follow_the_target"
PENALTIES = FOLLOWS + "[none-penalties]"
SAME_DRAFT = ENGINE + "test_a_draft_that_is_the_target_is_processed_like_it[none]"
SLICED = ENGINE + "test_a_vocabulary_parallel_target_emits_the_same[rejection-min-p]"
SAMPLES = "tests/job/test_row_options.py::test_rows_have_numbers_of_samples_of_their_own"

PROCESSING_FAULTS = (
    Mutant("penalties-do-not-know-candidates", "LogitsProcessors._counts",
        "if (asked.positions_N > since_N).any():",
        "if False:",
        (PENALTIES, ALIKE + "[frequency-1]")),
    Mutant("target-is-not-processed", "LocalTarget.forward",
        "FullDistributions.of(processed.scores_Nv, settings, verify_input, filters)",
        "FullDistributions.of(logits_NV, settings, verify_input, filters)",
        (PENALTIES,)),
    Mutant("draft-is-not-processed", "DraftRuns._step",
        "logits_AV, filters = self._pipeline",
        "_, filters = self._pipeline",
        (SAME_DRAFT,)),
    Mutant("tokens-in-shared-pages-are-not-told", "OpenedSequences.of",
        "token_ids[: each.num_shared]",
        "token_ids[:0]",
        (ENGINE + "test_prompts_whose_pages_are_shared_are_known",)),
    Mutant("rows-have-options-of-the-run", "OpenedSequences.of",
        "(request.options or processing.defaults)",
        "processing.defaults",
        (RANDOM_RUNS,)),
    Mutant("greedy-rows-draw", "RowFilters.probabilities",
        "return torch.where(self.is_greedy_N1.bool(), one_hot_NV, probabilities_NV)",
        "return probabilities_NV",
        (RANDOM_RUNS,)),
    Mutant("slices-filter-by-their-own-largest", "VocabParallelVerifier._filtered",
        "top_SNK = self.collectives.gather_everywhere(top_scores(scores_Nv, num_largest))",
        "top_SNK = top_scores(scores_Nv, num_largest)[None]",
        (SLICED,)),
    Mutant("top-k-after-top-p", "RowFilters.probabilities",
        "        if self.most_top_k:\n            scores_NV = self.within_top_k",
        "        if self.most_top_k and not self.has_top_p:\n            scores_NV = self.within_top_k",
        (FOLLOWS + "[none-all]", ALIKE)),
    Mutant("bad-words-do-not-end-with-candidates", "LogitsProcessors._without_bad_words",
        "places_N = np.maximum(asked.positions_N - distance, 0)",
        "places_N = np.maximum(asked.positions_N - distance - 1, 0)",
        (ALIKE + "[bad words-1]", FOLLOWS + "[none-words]")),
    Mutant("log-probabilities-of-processed-distribution", "WholeLogits.logprobs",
        "raw_MV, num_top = self.logits_NV[places_M],",
        "raw_MV, num_top = self.scores_NV[places_M],",
        (RANDOM_RUNS,)),
    Mutant("log-probabilities-of-next-token-at-another-position", "LogprobBook.note_next_tokens",
        "[len(sequence.token_ids) for sequence, _ in drawn]",
        "[len(sequence.token_ids) - 1 for sequence, _ in drawn]",
        (RANDOM_RUNS,)),
    Mutant("branch-does-not-know-tokens-before-it", "DraftState.copy_prefixes",
        "self.token_ids[draft_slot, :end] = self.token_ids[slot, :end]",
        "pass",
        (ENGINE + "test_branches_are_processed_like_what_they_branch_off",)),
    Mutant("scored-prompts-share-pages", "Scheduler._admit",
        "is_shared=not sequence.runs_whole_prompt,",
        "is_shared=True,",
        (RANDOM_RUNS,)),
    Mutant("prompts-scored-by-one-slice", "VocabParallelVerifier._prompt_scores",
        "return partial_prompt_scores(self._prompt_Pv, self._ids, ids_P, num_top)",
        "return partial_prompt_scores(self._prompt_Pv, range(len(self._ids)), ids_P, num_top)",
        (RANDOM_RUNS,)),
    Mutant("ranks-do-not-know-which-prompts-are-scored", "unpacked_pass",
        "prompts=PromptTokens(*arrays[9:11]),",
        "prompts=PromptTokens(arrays[9], 0 * arrays[10]),",
        ("tests/job/test_row_options.py::test_processed_tokens_are_those_of_transformers",)),
    Mutant("rows-have-the-samples-of-the-run", "RowRequests.num_samples",
        "return self._num_samples if own is None else own[row]",
        "return self._num_samples",
        (SAMPLES,)),
    Mutant("options-of-rows-known-to-rank-0-alone", "unpacked_pass",
        "opened=unpickled(arrays[11]) or NOTHING_OPENED,",
        "opened=NOTHING_OPENED,",
        (ON_RANKS,)),
)
