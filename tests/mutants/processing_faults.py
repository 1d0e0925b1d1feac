"""Faults in what shapes the distributions of single rows: penalties, biases, filters of their own."""

from tests.mutants.mutant import Mutant

PROCESSORS = "tests/sampling/test_processors.py::"
ALIKE = PROCESSORS + "test_a_processor_does_what_transformers_does"
ENGINE = "tests/engine/test_processing.py::"
FOLLOWS = ENGINE + "test_processed_tokens_follow_the_target"
PENALTIES = FOLLOWS + "[none-penalties]"
SAME_DRAFT = ENGINE + "test_a_draft_that_is_the_target_is_processed_like_it[none]"
ROWS = ENGINE + "test_rows_of_one_batch_have_options_of_their_own[none-whole]"
SLICED = ENGINE + "test_a_vocabulary_parallel_target_emits_the_same[rejection-min-p]"

SCORED_PLAIN = "tests/engine/test_prompt_logprobs.py::test_prompts_are_scored_as_by_a_plain_pass"
PROMPTS_SCORED = "tests/engine/test_prompt_logprobs.py::test_a_prompt_in_the_cache_is_run_once_more"
SAMPLES = "tests/job/test_row_options.py::test_rows_have_numbers_of_samples_of_their_own"
LOGPROBS = "tests/engine/test_logprobs.py::test_log_probabilities_are_those_of_a_plain_pass"

PROCESSING_FAULTS = (
    Mutant(
        name="penalties-do-not-know-candidates",
        file="sampling/processors.py",
        old="if (asked.positions_N > since_N).any():",
        new="if False:",
        tests=(PENALTIES, ALIKE + "[frequency-1]"),
    ),
    Mutant(
        name="penalties-of-completion-count-prompt",
        file="sampling/processors.py",
        old="self._counts(asked, asked.table.num_prompt_tokens[asked.slots_N])",
        new="self._counts(asked, np.zeros_like(asked.positions_N))",
        tests=(ALIKE + "[presence-1]",),
    ),
    Mutant(
        name="target-is-not-processed",
        file="engine/local_target.py",
        old="FullDistributions.of(processed.scores_Nv, settings, verify_input, filters)",
        new="FullDistributions.of(logits_NV, settings, verify_input, filters)",
        tests=(PENALTIES,),
    ),
    Mutant(
        name="draft-is-not-processed",
        file="engine/draft_loop.py",
        old="logits_AV, filters = self._pipeline",
        new="_, filters = self._pipeline",
        tests=(SAME_DRAFT,),
    ),
    Mutant(
        name="draft-is-processed-without-its-last-token",
        file="engine/draft_loop.py",
        old="self._draft_state.token_ids[places] = step.drawn_A.numpy()",
        new="pass",
        tests=(SAME_DRAFT,),
    ),
    Mutant(
        name="tokens-in-shared-pages-are-not-told",
        file="engine/opened.py",
        old="token_ids[: None if has_window else each.num_shared]",
        new="token_ids[:0]",
        tests=(ENGINE + "test_prompts_whose_pages_are_shared_are_known",),
    ),
    Mutant(
        name="rows-have-options-of-the-run",
        file="engine/opened.py",
        old="(request.options or processing.defaults)",
        new="processing.defaults",
        tests=(ROWS,),
    ),
    Mutant(
        name="greedy-rows-draw",
        file="sampling/row_filters.py",
        old="return torch.where(self.is_greedy_N1.bool(), one_hot_NV, probabilities_NV)",
        new="return probabilities_NV",
        tests=(ROWS,),
    ),
    Mutant(
        name="slices-filter-by-their-own-largest",
        file="engine/vocab_parallel.py",
        old="top_SNK = self._collectives.gather_everywhere(top_scores(scores_Nv, num_largest))",
        new="top_SNK = top_scores(scores_Nv, num_largest)[None]",
        tests=(SLICED,),
    ),
    Mutant(
        name="top-k-after-top-p",
        file="sampling/row_filters.py",
        old="        if self.most_top_k:\n            scores_NV = self.within_top_k",
        new="        if self.most_top_k and not self.has_top_p:\n            scores_NV = self.within_top_k",
        tests=(FOLLOWS + "[none-all]", ALIKE),
    ),
    Mutant(
        name="bad-words-do-not-end-with-candidates",
        file="sampling/processors.py",
        old="places_N = np.maximum(asked.positions_N - distance, 0)",
        new="places_N = np.maximum(asked.positions_N - distance - 1, 0)",
        tests=(ALIKE + "[bad words-1]", FOLLOWS + "[none-words]"),
    ),
    Mutant(
        name="log-probabilities-of-processed-distribution",
        file="engine/logprobs.py",
        old="whole_logprobs(self.logits_NV[places_M],",
        new="whole_logprobs(self.scores_NV[places_M],",
        tests=(LOGPROBS + "[penalties-whole]",),
    ),
    Mutant(
        name="log-probabilities-of-processed-slices",
        file="engine/vocab_parallel.py",
        old="return partial_scores(raw_Mv, scored_Mv,",
        new="return partial_scores(scored_Mv, scored_Mv,",
        tests=(LOGPROBS + "[penalties-sliced]",),
    ),
    Mutant(
        name="log-probabilities-of-one-slice",
        file="sampling/logprobs.py",
        old="own_4SM[0].logsumexp(dim=0)",
        new="own_4SM[0].amax(dim=0)",
        tests=(LOGPROBS + "[plain-sliced]",),
    ),
    Mutant(
        name="log-probabilities-of-next-token-at-another-position",
        file="engine/verify.py",
        old="[len(sequence.token_ids) for sequence, _ in drawn]",
        new="[len(sequence.token_ids) - 1 for sequence, _ in drawn]",
        tests=(LOGPROBS + "[plain-whole]",),
    ),
    Mutant(
        name="log-probabilities-of-candidates-by-logits-after-them",
        file="engine/blocks.py",
        old="index_M = ranges_from(starts_R, ",
        new="index_M = 1 + ranges_from(starts_R, ",
        tests=(LOGPROBS + "[plain-whole]",),
    ),
    Mutant(
        name="row-stops-as-run-does",
        file="engine/stopping.py",
        old="return self.strings if sequence.request.stop is None else sequence.request.stop",
        new="return self.strings",
        tests=("tests/engine/test_stopping.py",),
    ),
    Mutant(
        name="branch-does-not-know-tokens-before-it",
        file="engine/draft_state.py",
        old="self.token_ids[draft_slot, :end] = self.token_ids[slot, :end]",
        new="pass",
        tests=(ENGINE + "test_branches_are_processed_like_what_they_branch_off",),
    ),
    Mutant(
        name="scored-prompts-share-pages",
        file="engine/scheduler.py",
        old="token_ids, is_shared = sequence.token_ids, not sequence.runs_whole_prompt",
        new="token_ids, is_shared = sequence.token_ids, True",
        tests=(PROMPTS_SCORED,),
    ),
    Mutant(
        name="prompts-scored-by-logits-after-their-tokens",
        file="engine/logprobs.py",
        old="np.arange(first, first + end - chunk.begin - 1)",
        new="np.arange(first, first + end - chunk.begin - 1) + 1",
        tests=(SCORED_PLAIN + "[plain-whole]",),
    ),
    Mutant(
        name="chunks-of-prompts-scored-without-their-last-token",
        file="engine/logprobs.py",
        old="end = min(chunk.end + 1, sequence.num_prompt_tokens)",
        new="end = min(chunk.end, sequence.num_prompt_tokens)",
        tests=(SCORED_PLAIN + "[plain-whole]",),
    ),
    Mutant(
        name="chunks-of-prompts-scored-where-another-begins",
        file="engine/logprobs.py",
        old="            first += size\n",
        new="",
        tests=(SCORED_PLAIN + "[plain-whole]",),
    ),
    Mutant(
        name="prompts-scored-by-one-slice",
        file="engine/vocab_parallel.py",
        old="return partial_prompt_scores(self._prompt_Pv, self._ids, ids_P, num_top)",
        new="return partial_prompt_scores(self._prompt_Pv, range(len(self._ids)), ids_P, num_top)",
        tests=(SCORED_PLAIN + "[plain-sliced]",),
    ),
    Mutant(
        name="ranks-do-not-know-which-prompts-are-scored",
        file="engine/sharded_target.py",
        old="prompts = PromptTokens(target_pass.prompt_indices_P, target_pass.prompt_ids_P)",
        new="prompts = PromptTokens(target_pass.prompt_indices_P, 0 * target_pass.prompt_ids_P)",
        tests=("tests/job/test_row_options.py::test_processed_tokens_are_those_of_transformers",),
    ),
    Mutant(
        name="memory-without-the-logits-of-prompts",
        file="job/allocation.py",
        old="    if sampling.scores_prompts:\n",
        new="    if False:\n",
        tests=("tests/job/test_allocation.py::test_scored_prompts_need_the_logits_of_a_whole_pass",),
    ),
    Mutant(
        name="rows-have-the-samples-of-the-run",
        file="job/row_requests.py",
        old="return self._num_samples if own is None else own[row]",
        new="return self._num_samples",
        tests=(SAMPLES,),
    ),
    Mutant(
        name="sums-of-samples-not-in-the-manifest",
        file="job/preflight.py",
        old="**({} if sums is None else {COMPLETIONS_PER_SHARD: sums}),",
        new="",
        tests=(SAMPLES,),
    ),
    Mutant(
        name="rows-have-penalties-of-the-run",
        file="job/row_options.py",
        old="given = {name: own[name] for name in DISTRIBUTION_OPTIONS if name in own}",
        new='given = {name: own[name] for name in DISTRIBUTION_OPTIONS if name in own and "penalty" not in name}',
        tests=("tests/job/test_row_options.py::test_rows_have_options_of_their_own",),
    ),
    Mutant(
        name="options-of-rows-known-to-rank-0-alone",
        file="engine/sharded_target.py",
        old="        verify_input = dataclasses.replace(verify_input, opened=target_pass.opened)\n",
        new="        pass\n",
        tests=(
            "tests/engine/test_slices.py"
            "::test_twenty_combinations_of_options_follow_the_target_on_three_ranks",
        ),
    ),
)
