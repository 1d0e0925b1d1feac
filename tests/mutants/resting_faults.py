"""Faults in a draft that rests, and in prompts that it has put off."""

from tests.mutants.mutant import Mutant

RESTING = "tests/engine/test_resting_draft.py"
CACHE = RESTING + "::test_whoever_is_drafted_for_has_all_its_tokens_in_the_cache"
LENGTHS = RESTING + "::test_rests_get_longer_until_something_is_drafted"
ONCE = RESTING + "::test_prompts_are_run_once_and_only_if_anything_is_drafted"

RESTING_FAULTS = (
    Mutant(
        name="all-that-the-cache-lacks-is-one-pass",
        file="engine/late_contexts.py",
        old="if np.maximum(ends_A - begins_A, 0).sum() > self._max_tokens:",
        new="if False:",
        tests=(RESTING + "::test_no_pass_is_larger_than_allowed_however_much_the_cache_lacks",),
    ),
    Mutant(
        name="late-draft-does-not-see-which-sequences-begin",
        file="engine/resting_draft.py",
        old="        self._late_contexts.follow(request)\n        reply = super()._respond(request)",
        new="        reply = super()._respond(request)",
        tests=(CACHE,),
    ),
    Mutant(
        name="pages-that-change-hands-count-as-written",
        file="engine/late_contexts.py",
        old="self._is_written[updates.pages[updates.indices * self._page_size >= ends]] = False",
        new="pass",
        tests=(CACHE,),
    ),
    Mutant(
        name="shared-pages-count-as-written",
        file="engine/late_contexts.py",
        old="lacking = np.flatnonzero(~self._is_written[pages])",
        new="lacking = np.arange(self._num_shared[slot] // self._page_size, len(pages))",
        tests=(CACHE,),
    ),
    Mutant(
        name="every-owner-runs-the-tokens-of-shared-pages",
        file="engine/late_contexts.py",
        old="            self._is_written[pages] = True\n",
        new="",
        tests=(ONCE,),
    ),
    Mutant(
        name="tokens-of-shared-pages-are-those-of-the-slot-s-last-sequence",
        file="engine/late_contexts.py",
        old="                self._read_shared(slot)\n",
        new="                pass\n",
        tests=(CACHE,),
    ),
    Mutant(
        name="late-contexts-of-sequences-before-in-the-slot-count-as-run",
        file="engine/late_contexts.py",
        old="self._draft_state.num_computed[slots_T[is_first_T]] = 0",
        new="pass",
        tests=(CACHE,),
    ),
    Mutant(
        name="late-contexts-are-never-run",
        file="engine/draft_state.py",
        old="            self.run_late_contexts(draft_slots_A)\n",
        new="            pass\n",
        tests=(CACHE,),
    ),
    Mutant(
        name="draft-rests-while-candidates-wait",
        file="engine/resting_draft.py",
        old="if self._draft_state.num_candidates[request.slots_R].any():",
        new="if False:",
        tests=(RESTING,),
    ),
    Mutant(
        name="rests-get-ever-longer",
        file="engine/resting_draft.py",
        old="self._num_rounds_alone = min(2 * num_rounds_alone, MOST_ROUNDS_ALONE)",
        new="self._num_rounds_alone = 2 * num_rounds_alone",
        tests=(LENGTHS,),
    ),
    Mutant(
        name="rest-after-a-draft-as-long-as-before-it",
        file="engine/resting_draft.py",
        old="            self._num_rounds_alone = NUM_ROUNDS_ALONE\n",
        new="            pass\n",
        tests=(LENGTHS,),
    ),
    Mutant(
        name="pauses-are-not-told-to-the-policy",
        file="engine/resting_draft.py",
        old="        if len(request.missed):\n",
        new="        if False:\n",
        tests=(CACHE,),
    ),
    Mutant(
        name="draft-rests-on-with-any-number-of-sequences",
        file="engine/on_demand.py",
        old="is_valid = (num_rows >= self._least_rows or not num_rows) and",
        new="is_valid =",
        tests=(RESTING + "::test_with_fewer_sequences_the_draft_is_asked_again",),
    ),
    Mutant(
        name="prompts-alone-end-a-rest",
        file="engine/on_demand.py",
        old="(num_rows >= self._least_rows or not num_rows)",
        new="num_rows >= self._least_rows",
        tests=(RESTING + "::test_prompts_alone_end_no_rest",),
    ),
)
