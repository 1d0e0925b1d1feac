"""Faults in constraints: masks on one side, states that are not taken back, forced tokens, their caches."""

from tests.mutants.mutant import Mutant

ENGINE = "tests/engine/test_constraints.py"
IN_TURNS = f"{ENGINE}::test_completions_follow_the_masked_target_s_distribution[in turns]"
ALWAYS = f"{ENGINE}::test_a_draft_that_equals_its_target_is_always_accepted"
NO_PASS = f"{ENGINE}::test_forced_tokens_cost_no_draft_pass"
CACHE = f"{ENGINE}::test_the_draft_s_cache_takes_in_what_was_forced"
ON_TOP = f"{ENGINE}::test_forced_tokens_come_on_top_of_drawn_ones"
MATCHER = "tests/constraints/test_matcher.py"
ANYWHERE = f"{MATCHER}::test_masks_are_a_function_of_the_tokens_alone"
THINKING = "tests/constraints/test_thinking.py"
JOB = "tests/job/test_constraints.py"

CONSTRAINT_FAULTS = (
    Mutant(
        name="draft-without-the-constraints-masks",
        file="engine/pipeline.py",
        old="return self.process(logits_AV[:, : self._vocab_size], asked, self.masks(asked))",
        new="return self.process(logits_AV[:, : self._vocab_size], asked, None)",
        tests=(ALWAYS,),
    ),
    Mutant(
        name="target-without-the-constraints-masks",
        file="engine/local_target.py",
        old="processed = self._pipeline.process(logits_NV, asked, self._pipeline.masks(asked))",
        new="processed = self._pipeline.process(logits_NV, asked, None)",
        tests=(IN_TURNS,),
    ),
    Mutant(
        name="forced-tokens-kept-without-verification",
        file="engine/verify.py",
        old="accepted_C = accepted(target_C, draft_C, uniforms_C) | is_trusted_C",
        new="accepted_C = accepted(target_C, draft_C, uniforms_C) | is_trusted_C | (draft_C == 1)",
        tests=(f"{ENGINE}::test_completions_follow_the_masked_target_s_distribution[memory]",),
    ),
    Mutant(
        name="dates-as-llguidance-has-them",
        file="constraints/constraint.py",
        old="json.dumps(with_real_dates(json.loads(self._schema_text)))",
        new="self._schema_text",
        tests=(f"{MATCHER}::test_dates_are_those_of_the_calendar",),
    ),
    Mutant(
        name="matcher-not-rolled-back",
        file="constraints/matcher.py",
        old="            self._go_back(num_same)\n",
        new="            pass\n",
        tests=(ANYWHERE,),
    ),
    Mutant(
        name="matcher-keeps-the-mask-of-other-tokens",
        file="constraints/matcher.py",
        old="for before, mask in self._known.items() if before <= num_tokens}",
        new="for before, mask in self._known.items()}",
        tests=(ANYWHERE, IN_TURNS),
    ),
    Mutant(
        name="constraint-of-the-slots-last-row",
        file="constraints/masker.py",
        old="if known is None or known[0].grammar != rule.grammar:",
        new="if known is None:",
        tests=(ALWAYS, JOB),
    ),
    Mutant(
        name="block-masked-as-if-nothing-was-drafted",
        file="constraints/matcher.py",
        old="asked.append((matcher, row + num_known, token_ids[num_before + num_known :]))",
        new="asked.append((matcher, row + num_known, []))",
        tests=(IN_TURNS,),
    ),
    Mutant(
        name="mask-of-the-position-before",
        file="constraints/matcher.py",
        old="self._keep({len(self._followed): mask_W.copy()})",
        new="self._keep({len(self._followed) + 1: mask_W.copy()})",
        tests=(ANYWHERE, IN_TURNS),
    ),
    Mutant(
        name="masks-of-several-threads-in-other-rows",
        file="constraints/matcher.py",
        old="single = [(each.library_matcher, row) for each",
        new="single = [(each.library_matcher, row + 1) for each",
        tests=(f"{MATCHER}::test_masks_of_many_sequences_are_those_of_each",),
    ),
    Mutant(
        name="forced-tokens-of-a-grammar-that-is-left",
        file="constraints/matcher.py",
        old="forced: list[int] = self.library_matcher.compute_ff_tokens()",
        new="forced: list[int] = self.library_matcher.compute_ff_tokens() or [1]",
        tests=(ANYWHERE, IN_TURNS),
    ),
    Mutant(
        name="policies-count-forced-tokens",
        file="engine/lessons.py",
        old="num_free_R = state.num_free(slots_R, state.num_candidates[slots_R])\n"
        "        num_free_accepted_R = state.num_free(slots_R, num_accepted_R)\n",
        new="num_free_R, num_free_accepted_R = state.num_candidates[slots_R], num_accepted_R\n",
        tests=(f"{ENGINE}::test_policies_count_the_tokens_that_were_drawn",),
    ),
    Mutant(
        name="forced-run-as-long-as-the-policy-drafts",
        file="engine/forced_tokens.py",
        old="runs = self._pipeline.forced(lines_A, begins_A, most_R[active_A] - depths_A)",
        new="runs = self._pipeline.forced(lines_A, begins_A, np.minimum(2, most_R[active_A]) - depths_A)",
        tests=(NO_PASS,),
    ),
    Mutant(
        name="forced-tokens-counted-as-cached",
        file="engine/forced_tokens.py",
        old="state.num_computed[places[0]] = places[1]",
        new="state.num_computed[lines_R] = tails_R + wanted_R",
        tests=(CACHE,),
    ),
    Mutant(
        name="branch-adopted-with-forced-tokens-as-cached",
        file="engine/adoption.py",
        old="state.num_computed[slots_B] = np.minimum(computed_B, positions_B + lengths_B)",
        new="state.num_computed[slots_B] = positions_B + lengths_B",
        tests=(CACHE,),
    ),
    Mutant(
        name="forced-tokens-run-like-others",
        file="engine/forced_tokens.py",
        old="        if not counts_A.any():\n            return\n",
        new="        return\n",
        tests=(NO_PASS,),
    ),
    Mutant(
        name="bad-constraint-of-a-row-is-no-constraint",
        file="job/constraints.py",
        old='raise RowError(f"{self._column} cannot be used: {error}") from error',
        new="grammar = self.grammar",
        tests=(JOB,),
    ),
    Mutant(
        name="thinking-ends-a-token-late",
        file="constraints/masker.py",
        old="num_tokens >= self.max_thinking_tokens",
        new="num_tokens > self.max_thinking_tokens",
        tests=(THINKING,),
    ),
    Mutant(
        name="end-of-thinking-begun-anew",
        file="constraints/thinking.py",
        old="return self.end_ids[size]",
        new="return self.end_ids[0]",
        tests=(THINKING,),
    ),
    Mutant(
        name="drawn-tokens-judged-as-forced-ones",
        file="engine/draft_worker.py",
        old="draft_probabilities_C=state.probabilities[places_C],",
        new="draft_probabilities_C=np.ones(len(places_C[0])),",
        tests=(IN_TURNS,),
    ),
    Mutant(
        name="drawn-tokens-are-certain",
        file="engine/draft_scores.py",
        old="certain = np.flatnonzero(steps_W == CERTAIN)",
        new="certain = np.flatnonzero(steps_W != NO_STEP)",
        tests=("tests/engine/test_draft_scores.py",),
    ),
    Mutant(
        name="certain-token-of-another-row",
        file="engine/draft_scores.py",
        old="scores_WV[upload(self._device, certain, lines_W[certain])] = certainty",
        new="scores_WV[upload(self._device, certain, np.roll(lines_W[certain], 1))] = certainty",
        tests=("tests/engine/test_draft_scores.py",),
    ),
    Mutant(
        name="no-forced-tokens-after-those-drafted-ahead",
        file="engine/draft_ahead.py",
        old="        self._add_forced(request)\n",
        new="",
        tests=(ON_TOP,),
    ),
    Mutant(
        name="forced-tokens-count-as-drawn-ones-ahead",
        file="engine/draft_ahead.py",
        old="num_kept_R = state.num_with_free(slots_R, num_ready_R, self._max_draft_tokens)",
        new="num_kept_R = np.minimum(num_ready_R, self._max_draft_tokens)",
        tests=(ON_TOP,),
    ),
    Mutant(
        name="chain-ahead-as-long-with-forced-tokens-as-without",
        file="engine/draft_ahead.py",
        old="                most_R=np.minimum(np.concatenate([most_S, most_B]), room_R),\n",
        new="",
        tests=(ON_TOP,),
    ),
    Mutant(
        name="target-goes-on-alone-where-tokens-are-forced",
        file="engine/draft_ahead.py",
        old="        if self._forcing is not None:\n            self._num_quiet",
        new="        if False:\n            self._num_quiet",
        tests=(ON_TOP,),
    ),
)
