"""Faults in the round: engine, draft, work ahead, branches, pages and stopping."""

from tests.mutants.mutant import Mutant
from tests.mutants.sampling_faults import AHEAD, BRANCHES, DISTRIBUTION, IN_TURNS

LONE_DRAFT = "tests/engine/test_branches.py::test_candidates_always_continue_the_committed_tokens[llama]"
BRANCH_CHOICE = "tests/engine/test_branches.py"
GIVING_WAY = DISTRIBUTION + "test_preemption_does_not_bias_the_output"
STOPS = DISTRIBUTION + "test_stop_tokens_do_not_bias_the_output"
ROW_IDENTITY = "tests/engine/test_row_identity.py"
SAME_MODEL = DISTRIBUTION + "test_a_draft_that_is_the_target_is_accepted_always"
IDENTITY = "tests/engine/test_identity.py"
PAGES = "tests/cache/test_pages.py"
LITTLE_MEMORY = (
    "tests/engine/test_faults.py::"
    "test_too_little_memory_makes_the_batch_smaller_and_changes_no_token[target-none-greedy]"
)
DRAFT_CACHE = "tests/engine/test_draft_cache.py"
STOPPING = "tests/engine/test_stopping.py"
TEXTS = "tests/engine/test_detokenizer.py"

ENGINE_FAULTS = (
    Mutant(
        name="bonus-token-drawn-one-position-early",
        file="engine/verify.py",
        old="index_W = starts_R + num_accepted_R - num_skipped_R\n",
        new="index_W = starts_R + np.maximum(num_accepted_R - num_skipped_R - 1, 0)\n",
        tests=(IN_TURNS,),
        is_dangerous=True,
    ),
    Mutant(
        name="decision-always-drawn-after-whole-block",
        file="engine/verify.py",
        old="index_W = starts_R + num_accepted_R - num_skipped_R\n",
        new="index_W = starts_R + num_logits_R - 1\n",
        tests=(IN_TURNS,),
    ),
    Mutant(
        name="blocks-stand-one-position-too-late",
        file="engine/blocks.py",
        old="(each.slot, each.stream_key, len(each.token_ids))",
        new="(each.slot, each.stream_key, len(each.token_ids) + 1)",
        tests=(IN_TURNS,),
    ),
    Mutant(
        name="rejected-candidates-stay-in-drafts-cache",
        file="engine/draft_worker.py",
        old="        state.num_computed[slots_R] = np.minimum(state.num_computed[slots_R], kept_R)\n",
        new="",
        tests=(DRAFT_CACHE,),
    ),
    Mutant(
        name="draft-never-runs-what-cache-lacks",
        file="engine/draft_state.py",
        old="begins_A = np.minimum(self.num_computed[draft_slots_A], positions_A - 1)",
        new="begins_A = positions_A - 1",
        tests=(
            DRAFT_CACHE,
            SAME_MODEL,
        ),
    ),
    Mutant(
        name="tokens-drafted-ahead-kept-after-miss",
        file="engine/draft_worker.py",
        old="np.where(is_hit_R, state.num_ahead[slots_R] - 1, 0)",
        new="np.maximum(state.num_ahead[slots_R] - 1, 0)",
        tests=(LONE_DRAFT,),
    ),
    Mutant(
        name="token-drafted-ahead-judged-by-neighbours-probability",
        file="engine/first_ahead.py",
        old="torch.from_numpy(state.probabilities[slots_W, positions_W])",
        new="torch.from_numpy(state.probabilities[slots_W, positions_W + 1])",
        tests=(AHEAD,),
    ),
    Mutant(
        name="rejected-token-ahead-leaves-no-residual",
        file="engine/draft_worker.py",
        old="np.where(is_rejected_R[drawn], positions_W, NOWHERE)",
        new="np.where((num_accepted_R < num_candidates_R)[drawn], positions_W, NOWHERE)",
        tests=(AHEAD,),
    ),
    Mutant(
        name="draft-does-not-count-rows-misses",
        file="engine/draft_worker.py",
        old="        state.num_misses[slots_R] += is_rejected_R\n",
        new="",
        tests=(ROW_IDENTITY,),
    ),
    Mutant(
        name="engine-counts-no-miss-of-token-ahead",
        file="engine/engine.py",
        old="missed = not ahead.is_hit and (ahead.num_tokens > 0 or not was_full)",
        new="missed = not was_full",
        tests=(ROW_IDENTITY,),
    ),
    Mutant(
        name="row-gave-way-goes-on-with-new-decision",
        file="engine/next_round.py",
        old="DRAW if s.forced_next_token is None else s.forced_next_token",
        new="s.token_ids[-1] if s.forced_next_token is not None else DRAW",
        tests=(ROW_IDENTITY, GIVING_WAY),
    ),
    Mutant(
        name="row-gave-way-keeps-unfinished-block",
        file="engine/sequence.py",
        old="            del self.token_ids[start.length :], self.trace[start.num_traced :]\n",
        new="            del self.trace[start.num_traced :]\n",
        tests=(ROW_IDENTITY, GIVING_WAY),
    ),
    Mutant(
        name="row-gave-way-counts-block-twice",
        file="engine/sequence.py",
        old="self.num_redraft, self.counters = start.num_candidates, start.counters",
        new="self.num_redraft = start.num_candidates",
        tests=(ROW_IDENTITY,),
    ),
    Mutant(
        name="next-token-that-fills-a-completion-does-not-end-it",
        file="engine/stopping.py",
        old="        may_end = set(near_ends)\n",
        new="        may_end: set[int] = set()\n",
        tests=(STOPPING,),
    ),
    Mutant(
        name="next-token-that-is-a-stop-token-does-not-end-its-sequence",
        file="engine/stopping.py",
        old="ending_ids = self.token_ids | {not_finite}",
        new="ending_ids = {not_finite}",
        tests=(STOPPING,),
    ),
    Mutant(
        name="stop-token-not-emitted",
        file="engine/stopping.py",
        old='num_kept, reason = index + 1, "stop"',
        new='num_kept, reason = index, "stop"',
        tests=(
            STOPPING,
            STOPS,
        ),
    ),
    Mutant(
        name="tokens-after-stop-token-emitted",
        file="engine/stopping.py",
        old='                num_kept, reason = index + 1, "stop"\n',
        new='                reason = "stop"\n',
        tests=(STOPPING,),
    ),
    Mutant(
        name="stop-string-found-token-late",
        file="engine/stopping.py",
        old="added(prompt_ids, committed + new_ids[:count], skip_special=False)",
        new="added(prompt_ids, committed + new_ids[: count - 1], skip_special=False)",
        tests=(IDENTITY + "::test_stop_strings_cut_a_block_where_they_fall", TEXTS),
    ),
    Mutant(
        name="stop-strings-sought-without-special-tokens",
        file="engine/stopping.py",
        old="text = self.detokenizer.decode(last_ids + new_ids, False)",
        new="text = self.detokenizer.decode(last_ids + new_ids, True)",
        tests=(TEXTS,),
    ),
    Mutant(
        name="completion-decoded-without-its-prompt",
        file="engine/detokenizer.py",
        old="        context = self.context(before_ids)\n",
        new="        context: list[int] = []\n",
        tests=(TEXTS,),
    ),
    Mutant(
        name="text-cut-among-bytes-that-are-one-text",
        file="engine/detokenizer.py",
        old="token_id not in self.special_ids and token_id not in self.byte_ids",
        new="token_id not in self.special_ids",
        tests=(TEXTS,),
    ),
    Mutant(
        name="stop-string-in-bytes-that-are-cut-apart",
        file="engine/detokenizer.py",
        old="for begin in range(NUM_TOKENS_BEFORE + 1):",
        new="for begin in range(1):",
        tests=(TEXTS,),
    ),
    Mutant(
        name="stop-string-looked-for-in-too-few-tokens",
        file="engine/detokenizer.py",
        old="num_left -= self._is_written(token_ids[begin])",
        new="num_left -= 3 if self._is_written(token_ids[begin]) else 1",
        tests=(TEXTS,),
    ),
    Mutant(
        name="text-before-stop-string-shows-special-token",
        file="engine/detokenizer.py",
        old="is_text = token_ids[count] not in self.special_ids",
        new="is_text = True",
        tests=(TEXTS,),
    ),
    # Branches.
    Mutant(
        name="branch-adopted-for-another-token",
        file="engine/branches.py",
        old="        is_it &= self._token_ids[slots_S] == token_ids_S[:, None]\n",
        new="",
        tests=(LONE_DRAFT,),
    ),
    Mutant(
        name="branch-adopted-at-another-position",
        file="engine/branches.py",
        old="is_it = self._positions[slots_S] == positions_S[:, None]",
        new="is_it = self._positions[slots_S] != UNUSED",
        tests=(LONE_DRAFT,),
    ),
    Mutant(
        name="adopted-branch-probabilities-of-lost-chain",
        file="engine/draft_state.py",
        old="for numbers in (self.token_ids, self.probabilities, self.is_forced):",
        new="for numbers in (self.token_ids, self.is_forced):",
        tests=(BRANCHES,),
        is_dangerous=True,
    ),
    Mutant(
        name="adopted-branch-scores-of-lost-chain",
        file="engine/draft_state.py",
        old="        self.scores.copy(sources, targets)\n",
        new="",
        tests=(BRANCHES,),
    ),
    Mutant(
        name="branch-draws-numbers-of-chain-replaces",
        file="engine/draft_ahead.py",
        old="state.num_misses[draft_slots_B] = state.num_misses[slots_B] + 1",
        new="state.num_misses[draft_slots_B] = state.num_misses[slots_B]",
        tests=(ROW_IDENTITY,),
    ),
    Mutant(
        name="branches-draw-from-stream-of-their-own",
        file="engine/draft_ahead.py",
        old="        state.stream_keys[draft_slots_B] = state.stream_keys[slots_B]\n",
        new="",
        tests=(ROW_IDENTITY,),
    ),
    Mutant(
        name="branch-written-into-rows-own-pages",
        file="cache/branch_pages.py",
        old="        self.pages[branches_B[:, None], columns_BP] = "
        "self._own_pages[branches_B - self._num_slots]\n",
        new="",
        tests=(DRAFT_CACHE,),
    ),
    Mutant(
        name="branch-lacks-what-stands-before-in-first-page",
        file="cache/branch_pages.py",
        old="return self._copies(slots_B, branches_B, begins_B, positions_B - begins_B)",
        new="return self._copies(slots_B, branches_B, begins_B, 0 * begins_B)",
        tests=(LONE_DRAFT,),
    ),
    Mutant(
        name="adopted-branchs-keys-stay-after",
        file="engine/draft_worker.py",
        old="        self._ahead.adoption.finish()\n        if self._runner.has_head:\n",
        new="        if self._runner.has_head:\n",
        tests=(DRAFT_CACHE,),
    ),
    Mutant(
        name="adopted-branchs-keys-come-after-what-is-drafted-before-the-reply",
        file="engine/draft_worker.py",
        old="in wanted_now:\n            self._ahead.adoption.finish()\n",
        new="in wanted_now:\n",
        tests=(DRAFT_CACHE,),
    ),
    Mutant(
        name="adopted-though-the-request-has-failed",
        file="engine/adoption.py",
        old='will be opened again."""\n        self._put_off = []\n',
        new='will be opened again."""\n',
        tests=("tests/engine/test_adoption.py",),
    ),
    Mutant(
        name="likeliest-branch-looked-for-without-what-stands-before-it",
        file="engine/branches.py",
        old="scores[lines_N, offsets_N] = reached[:, None] * chances_NA",
        new="scores[lines_N, offsets_N] = chances_NA",
        tests=(BRANCH_CHOICE + "::test_the_likeliest_misses_are_chosen",),
    ),
    # Pages.
    Mutant(
        name="page-known-by-own-tokens-alone",
        file="cache/pages.py",
        old="hashlib.blake2b(key + page_bytes, digest_size=DIGEST_BYTES)",
        new="hashlib.blake2b(page_bytes, digest_size=DIGEST_BYTES)",
        tests=(PAGES,),
        is_dangerous=True,
    ),
    Mutant(
        name="page-shared-before-full",
        file="cache/pages.py",
        old="min(length // self.page_size, len(own.keys))",
        new="min(-(-length // self.page_size), len(own.keys))",
        tests=(PAGES,),
    ),
    Mutant(
        name="last-token-of-context-shared",
        file="cache/pages.py",
        old="own.keys[: (len(context_ids) - 1) // self.page_size]",
        new="own.keys[: len(context_ids) // self.page_size]",
        tests=(PAGES,),
    ),
    Mutant(
        name="page-freed-while-another-row-shares-it",
        file="cache/pages.py",
        old="            if self._references[page] == 0:\n",
        new="            if self._references[page] <= 1:\n",
        tests=(PAGES,),
    ),
    Mutant(
        name="evictable-page-not-taken-out-of-queue-when-shared-again",
        file="cache/pages.py",
        old="        self._evictable.pop(page, None)\n",
        new="",
        tests=(PAGES,),
    ),
    Mutant(
        name="pages-whose-pass-failed-can-be-found",
        file="cache/pages.py",
        old="        self._page_of_key.clear()\n        self._key_of_page.clear()\n",
        new="",
        tests=(PAGES, LITTLE_MEMORY),
    ),
)
