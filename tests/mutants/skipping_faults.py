"""Faults in a draft that is skipped, and in prompts that it has put off."""

from tests.mutants.mutant import Mutant

SKIPPING = "tests/engine/test_lazy_prefill.py"
CACHE = SKIPPING + "::test_whoever_is_drafted_for_has_all_its_tokens_in_the_cache"
LENGTHS = SKIPPING + "::test_skips_get_longer_until_something_is_drafted"
ONCE = SKIPPING + "::test_prompts_are_run_once_and_only_if_anything_is_drafted"

SKIPPING_FAULTS = (
    Mutant("all-that-the-cache-lacks-is-one-pass", "LazyPrefill.run",
        "if np.maximum(ends_A - begins_A, 0).sum() > self._max_tokens:",
        "if False:",
        (SKIPPING + "::test_no_pass_is_larger_than_allowed_however_much_the_cache_lacks",)),
    Mutant("late-draft-does-not-see-which-sequences-begin", "DraftWorker._respond",
        "            self._lazy.follow(request)\n",
        "            pass\n",
        (CACHE,)),
    Mutant("pages-that-change-hands-count-as-written", "LazyPrefill.follow",
        "self._is_written[updates.pages[updates.indices * self._page_size >= ends]] = False",
        "pass",
        (CACHE,)),
    Mutant("every-owner-runs-the-tokens-of-shared-pages", "LazyPrefill._begins",
        "            self._is_written[pages] = True\n",
        "",
        (ONCE,)),
    Mutant("late-contexts-of-sequences-before-in-the-slot-count-as-run", "LazyPrefill.keep",
        "self._draft_state.num_computed[slots_T[is_first_T]] = 0",
        "pass",
        (CACHE,)),
    Mutant("draft-is-skipped-while-candidates-wait", "LazyPrefill.num_rounds_alone",
        "has_drafted = bool(self._draft_state.num_candidates[request.slots_R].any())",
        "has_drafted = False",
        (SKIPPING,)),
    Mutant("skips-get-ever-longer", "Pauses.after",
        "min(2 * self._num_rounds, MOST_PAUSED)",
        "2 * self._num_rounds",
        (LENGTHS,)),
    Mutant("draft-stays-skipped-with-any-number-of-sequences", "Draft.propose",
        "is_valid = (num_rows >= self._least_rows or not num_rows) and",
        "is_valid =",
        (SKIPPING + "::test_with_fewer_sequences_the_draft_is_asked_again",)),
)
