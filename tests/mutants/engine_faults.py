"""Faults in the round: engine, draft, work ahead, branches, pages and stopping."""

from tests.mutants.mutant import Mutant
from tests.mutants.sampling_faults import ASYNCHRONOUS, BRANCHES, DISTRIBUTION, SYNCHRONOUS

CANDIDATES = "tests/engine/test_draft_cache.py::test_what_is_drafted_continues_the_committed_tokens"
BRANCH_CHOICE = "tests/engine/test_branches.py"
SAME_MODEL = DISTRIBUTION + "test_a_draft_that_is_the_target_is_accepted_always"
IDENTITY = "tests/engine/test_identity.py"
PAGES = "tests/models/cache/test_pages.py"
LITTLE_MEMORY = (
    "tests/engine/test_faults.py::"
    "test_too_little_memory_makes_the_batch_smaller_and_changes_no_token[target-none-greedy]"
)
DRAFT_CACHE = "tests/engine/test_draft_cache.py"
STOPPING = "tests/engine/test_stopping.py"
TEXTS = "tests/engine/test_detokenizer.py"

ENGINE_FAULTS = (
    Mutant("bonus-token-drawn-one-position-early", "Verifier.verify",
        "index_W = starts_R + num_accepted_R - num_skipped_R\n",
        "index_W = starts_R + np.maximum(num_accepted_R - num_skipped_R - 1, 0)\n",
        (SYNCHRONOUS,), is_dangerous=True),
    Mutant("rejected-candidates-stay-in-drafts-cache", "DraftWorker._resolve",
        "        state.num_computed[slots_R] = np.minimum(state.num_computed[slots_R], kept_R)\n",
        "",
        (DRAFT_CACHE,)),
    Mutant("draft-never-runs-what-cache-lacks", "DraftState.catch_up",
        "begins_A = np.minimum(self.num_computed[draft_slots_A], positions_A - 1)",
        "begins_A = positions_A - 1",
        (DRAFT_CACHE, SAME_MODEL)),
    Mutant("tokens-drafted-ahead-kept-after-miss", "DraftWorker._resolve",
        "np.where(is_hit_R, state.num_ahead[slots_R] - 1, 0)",
        "np.maximum(state.num_ahead[slots_R] - 1, 0)",
        (CANDIDATES,)),
    Mutant("token-drafted-ahead-judged-by-neighbours-probability", "verify_first",
        "torch.from_numpy(state.probabilities[slots_W, positions_W])",
        "torch.from_numpy(state.probabilities[slots_W, positions_W + 1])",
        (ASYNCHRONOUS,)),
    Mutant("rejected-token-ahead-leaves-no-residual", "DraftWorker._resolve",
        "np.where(is_rejected_R[drawn], positions_W, NOWHERE)",
        "np.where((num_accepted_R < num_candidates_R)[drawn], positions_W, NOWHERE)",
        (ASYNCHRONOUS,)),
    Mutant("draft-does-not-count-rows-misses", "DraftWorker._resolve",
        "        state.num_misses[slots_R] += is_rejected_R\n",
        "",
        (IDENTITY,)),
    Mutant("row-gave-way-goes-on-with-new-decision", "LastPass.of",
        "DRAW if s.forced_next_token is None else s.forced_next_token",
        "s.token_ids[-1] if s.forced_next_token is not None else DRAW",
        (IDENTITY,)),
    Mutant("next-token-that-fills-a-completion-does-not-end-it", "StopRules.ends",
        "        may_end = set(near_ends)\n",
        "        may_end: set[int] = set()\n",
        (STOPPING,)),
    Mutant("tokens-after-stop-token-emitted", "StopRules.check",
        '                num_kept, reason = index + 1, "stop"\n',
        '                reason = "stop"\n',
        (STOPPING,)),
    Mutant("stop-string-found-token-late", "StopRules._num_until_stop",
        "added(prompt_ids, committed + new_ids[:count], skip_special=False)",
        "added(prompt_ids, committed + new_ids[: count - 1], skip_special=False)",
        (TEXTS,)),
    Mutant("completion-decoded-without-its-prompt", "Detokenizer.added",
        "        context = self.context(before_ids)\n",
        "        context: list[int] = []\n",
        (TEXTS,)),
    Mutant("text-cut-among-bytes-that-are-one-text", "Detokenizer._may_begin",
        "token_id not in self.special_ids and token_id not in self.byte_ids",
        "token_id not in self.special_ids",
        (TEXTS,)),
    # Branches.
    Mutant("branch-adopted-for-another-token", "BranchTable.find",
        "        is_it &= self._token_ids[slots_S] == token_ids_S[:, None]\n",
        "",
        (CANDIDATES,)),
    Mutant("adopted-branch-probabilities-of-lost-chain", "DraftState.copy_drafted",
        "for numbers in (self.token_ids, self.probabilities, self.is_forced):",
        "for numbers in (self.token_ids, self.is_forced):",
        (BRANCHES,), is_dangerous=True),
    Mutant("branch-draws-numbers-of-chain-replaces", "DraftBranches.open",
        "state.num_misses[draft_slots_B] = state.num_misses[slots_B] + 1",
        "state.num_misses[draft_slots_B] = state.num_misses[slots_B]",
        (IDENTITY,)),
    Mutant("branch-written-into-rows-own-pages", "BranchPageTable.open",
        ("        self.pages[branches_B[:, None], columns_BP] = "
         "self._own_pages[branches_B - self._num_slots]\n"),
        "",
        (DRAFT_CACHE,)),
    Mutant("adopted-branchs-keys-stay-after", "DraftWorker.prefill_and_draft_ahead",
        "        self._ahead.branches.finish()\n        if self._runner.head is not None:\n",
        "        if self._runner.head is not None:\n",
        (DRAFT_CACHE,)),
    Mutant("likeliest-branch-looked-for-without-what-stands-before-it", "BranchTable.choose",
        "scores[lines_N, offsets_N] = reached[:, None] * chances_NA",
        "scores[lines_N, offsets_N] = chances_NA",
        (BRANCH_CHOICE + "::test_the_likeliest_misses_are_chosen",)),
    # Pages.
    Mutant("page-known-by-own-tokens-alone", "PageTable._page_keys",
        "hashlib.blake2b(key + page_bytes, digest_size=DIGEST_BYTES)",
        "hashlib.blake2b(page_bytes, digest_size=DIGEST_BYTES)",
        (PAGES,), is_dangerous=True),
    Mutant("page-shared-before-full", "PageTable.publish",
        "min(length // self.page_size, len(own.keys))",
        "min(-(-length // self.page_size), len(own.keys))",
        (PAGES,)),
    Mutant("last-token-of-context-shared", "PageTable.open",
        "own.keys[: (len(context_ids) - 1) // self.page_size]",
        "own.keys[: len(context_ids) // self.page_size]",
        (PAGES,)),
    Mutant("page-freed-while-another-row-shares-it", "PageTable.close",
        "            if self._references[page] == 0:\n",
        "            if self._references[page] <= 1:\n",
        (PAGES,)),
    Mutant("pages-whose-pass-failed-can-be-found", "PageTable.forget_contents",
        "        self._page_of_key.clear()\n        self._key_of_page.clear()\n",
        "",
        (PAGES, LITTLE_MEMORY)),
)
