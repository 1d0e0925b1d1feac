"""Faults in constraints: masks on one side, states that are not taken back, forced tokens, their caches."""

from tests.mutants.mutant import Mutant

ENGINE = "tests/engine/test_constraints.py"
IN_TURNS = f"{ENGINE}::test_completions_follow_the_masked_target_s_distribution[in turns]"
ALWAYS = f"{ENGINE}::test_a_draft_that_equals_its_target_is_always_accepted"
NO_PASS = f"{ENGINE}::test_forced_tokens_cost_no_draft_pass"
CACHE = f"{ENGINE}::test_the_draft_s_cache_takes_in_what_was_forced"
MATCHER = "tests/constraints/test_matcher.py"
ANYWHERE = f"{MATCHER}::test_masks_are_a_function_of_the_tokens_alone"
THINKING = "tests/constraints/test_thinking.py"
JOB = "tests/job/test_constraints.py"

CONSTRAINT_FAULTS = (
    Mutant(
        name="draft-without-the-constraints-masks",
        file="engine/pipeline.py",
        old="return self.process(logits_AV[:, : self._vocab_size], asked, masks_AW)",
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
        new="",
        tests=(ANYWHERE,),
    ),
    Mutant(
        name="matcher-keeps-the-mask-of-other-tokens",
        file="constraints/matcher.py",
        old="        self.mask_W = None\n        return",
        new="        return",
        tests=(ANYWHERE, IN_TURNS),
    ),
    Mutant(
        name="constraint-of-the-slots-last-row",
        file="constraints/masker.py",
        old="if known is None or known[0] is not rule:",
        new="if known is None:",
        tests=(ALWAYS, JOB),
    ),
    Mutant(
        name="block-masked-as-if-nothing-was-drafted",
        file="constraints/masker.py",
        old="places.append((matcher, first, token_ids[known:]))",
        new="places.append((matcher, first, []))",
        tests=(IN_TURNS,),
    ),
    Mutant(
        name="forced-tokens-counted-as-cached",
        file="engine/forced_tokens.py",
        old="state.num_computed[lines_R] = np.minimum(self._num_computed[lines_R], ends_R)",
        new="pass",
        tests=(CACHE,),
    ),
    Mutant(
        name="branch-adopted-with-forced-tokens-as-cached",
        file="engine/draft_ahead.py",
        old="state.num_computed[slots_B] = np.minimum(computed_B, positions_B + lengths_B)",
        new="state.num_computed[slots_B] = positions_B + lengths_B",
        tests=(CACHE,),
    ),
    Mutant(
        name="forced-tokens-run-like-others",
        file="engine/forced_tokens.py",
        old="only_tokens(masks_AW) < 0",
        new="only_tokens(masks_AW) < len(masks_AW[0]) * 32",
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
        old="len(token_ids) >= rule.max_thinking_tokens",
        new="len(token_ids) > rule.max_thinking_tokens",
        tests=(THINKING,),
    ),
    Mutant(
        name="end-of-thinking-begun-anew",
        file="constraints/thinking.py",
        old="return self.end_ids[size]",
        new="return self.end_ids[0]",
        tests=(THINKING,),
    ),
)
