"""Faults in constraints: masks on one side, states that are not taken back, forced tokens, their caches."""

from tests.mutants.mutant import Mutant

ENGINE = "tests/engine/test_constraints.py"
SYNCHRONOUS = f"{ENGINE}::test_completions_follow_the_masked_target_s_distribution[synchronous]"
ALWAYS = f"{ENGINE}::test_a_draft_that_equals_its_target_is_always_accepted"
NO_PASS = f"{ENGINE}::test_forced_tokens_cost_no_draft_pass"
CACHE = f"{ENGINE}::test_the_draft_s_cache_takes_in_what_was_forced"
ON_TOP = f"{ENGINE}::test_forced_tokens_come_on_top_of_drawn_ones"
MATCHER = "tests/sampling/constraints/test_matcher.py"
ANYWHERE = f"{MATCHER}::test_masks_are_a_function_of_the_tokens_alone"
SCHEMAS = "tests/sampling/constraints/test_schemas.py"
THINKING = "tests/sampling/constraints/test_thinking.py"
JOB = "tests/job/test_constraints.py"

CONSTRAINT_FAULTS = (
    Mutant("draft-without-the-constraints-masks", "LogitsPipeline.process_drafted",
        "return self.process(logits_AV[:, : self._vocab_size], asked, self.masks(asked))",
        "return self.process(logits_AV[:, : self._vocab_size], asked, None)",
        (ALWAYS,)),
    Mutant("target-without-the-constraints-masks", "LocalTarget.forward",
        "processed = self._pipeline.process(logits_NV, asked, self._pipeline.masks(asked))",
        "processed = self._pipeline.process(logits_NV, asked, None)",
        (SYNCHRONOUS,)),
    Mutant("forced-tokens-kept-without-verification", "_verify_blocks",
        "accepted_C = accepted(target_C, draft_C, uniforms_C)",
        "accepted_C = accepted(target_C, draft_C, uniforms_C) | (draft_C == 1)",
        (f"{ENGINE}::test_completions_follow_the_masked_target_s_distribution[ngram]",)),
    Mutant("dates-as-llguidance-has-them", "_mended",
        'found["allOf"] = [*others, {"pattern": PATTERNS[kind]}]',
        "pass",
        (f"{MATCHER}::test_dates_are_those_of_the_calendar",)),
    Mutant("numbers-become-the-nearest-float64", "is_kept",
        "return SMALLEST <= number < LARGEST and int(float(number)) == number",
        "return SMALLEST <= number < LARGEST",
        (SCHEMAS,)),
    Mutant("dead-ends-are-ends", "Grammars.fill",
        "masks_MW[row : row + len(candidates) + 1] = 0",
        "pass",
        (f"{SCHEMAS}::test_a_dead_end_is_no_end",)),
    Mutant("matcher-that-gives-up-taken-for-nan", "mark_without_token",
        "failure = None if masker is None else masker.failure(sequence.slot)",
        "failure = None",
        (f"{ENGINE}::test_a_matcher_that_gives_up_ends_its_row_alone",)),
    Mutant("matcher-not-rolled-back", "Matcher._goes_to",
        "            self._go_back(num_same)\n",
        "            pass\n",
        (ANYWHERE,)),
    Mutant("constraint-of-the-slots-last-row", "RowMasker._matcher",
        "if known is None or known[0].grammar != rule.grammar:",
        "if known is None:",
        (ALWAYS, JOB)),
    Mutant("block-masked-as-if-nothing-was-drafted", "Grammars.fill",
        "asked.append((matcher, row + num_known, token_ids[num_before + num_known :]))",
        "asked.append((matcher, row + num_known, []))",
        (SYNCHRONOUS,)),
    Mutant("policies-count-forced-tokens", "Feedback.keep",
        ("num_free_R = state.num_free(slots_R, state.num_candidates[slots_R])\n"
         "        num_free_accepted_R = state.num_free(slots_R, num_accepted_R)\n"),
        "num_free_R, num_free_accepted_R = state.num_candidates[slots_R], num_accepted_R\n",
        (f"{ENGINE}::test_policies_count_the_tokens_that_were_drawn",)),
    Mutant("forced-run-as-long-as-the-policy-drafts", "ForcedTokens.add",
        "runs = self._pipeline.forced(lines_A, begins_A, limits_A - begins_A)",
        "runs = self._pipeline.forced(lines_A, begins_A, np.minimum(2, limits_A - begins_A))",
        (NO_PASS,)),
    Mutant("forced-tokens-counted-as-cached", "ForcedTokens.add",
        "        state.put_certain(places_T, ids_T)\n",
        ("        state.put_certain(places_T, ids_T)\n"
         "        state.num_computed[lines_A] = begins_A + counts_A\n"),
        (CACHE,)),
    Mutant("bad-constraint-of-a-row-is-no-constraint", "RunConstraints.given",
        'raise RowError(f"{name} cannot be used: {error}") from error',
        "grammar = self.grammar",
        (JOB,)),
    Mutant("thinking-ends-a-token-late", "RowRule.ends_thinking",
        "num_tokens >= self.max_thinking_tokens",
        "num_tokens > self.max_thinking_tokens",
        (THINKING,)),
    Mutant("drawn-tokens-judged-as-forced-ones", "DraftWorker._respond",
        "draft_probabilities_C=state.probabilities[places_C],",
        "draft_probabilities_C=np.ones(len(places_C[0])),",
        (SYNCHRONOUS,)),
    Mutant("no-forced-tokens-after-those-drafted-ahead", "AheadDrafter.hold_back",
        "        self._add_forced(request)\n",
        "",
        (ON_TOP,)),
)
