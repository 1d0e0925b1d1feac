"""Faults in the round: engine, draft, work ahead, branches, pages, stopping, heads and policies."""

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
POLICIES = "tests/engine/test_policies.py::test_output_follows_the_target_s_distribution"
SPRINTER = "tests/engine/test_sprinter.py::test_lossy_output_follows_the_distribution_of_the_mechanism"
LITTLE_MEMORY = (
    "tests/engine/test_faults.py::"
    "test_too_little_memory_makes_the_batch_smaller_and_changes_no_token[target-none-greedy]"
)
HEADS = "tests/engine/test_heads.py"
RUNS = "tests/gpu/test_waits.py::test_how_late_a_policy_is_asked_changes_no_row"
WAITS = "tests/gpu/test_waits.py::test_the_host_waits_twice_or_less_for_a_draft_and_once_for_a_pass"
HISTORIES = "tests/engine/test_histories.py"
THRESHOLDS = "tests/policies/test_thresholds.py"
HEAD_POLICIES = "tests/policies/test_heads.py"
LENGTHS = "tests/policies/test_lengths.py"
DRAFT_CACHE = "tests/engine/test_draft_cache.py"
STOPPING = "tests/engine/test_stopping.py"

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
        old="np.array([len(sequence.token_ids) for sequence in blocks.sequences], np.int64)",
        new="np.array([len(sequence.token_ids) + 1 for sequence in blocks.sequences], np.int64)",
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
        file="engine/engine.py",
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
        old="if first_stop(self.decode(committed + new_ids[:count]), strings) is not None",
        new="if first_stop(self.decode(committed + new_ids[: count - 1]), strings) is not None",
        tests=(IDENTITY + "::test_stop_strings_cut_a_block_where_they_fall",),
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
        file="engine/draft_ahead.py",
        old="            self._runner.adopt_branches(draft_slots_B, slots_B, positions_B, lengths_B)\n",
        new="",
        tests=(DRAFT_CACHE,),
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
    # Heads and lossy runs.
    Mutant(
        name="lossy-run-trusts-last-token-of-block-too",
        file="engine/blocks.py",
        old="num_trusted=max(0, num_drafted - 1) if trusts_draft else 0",
        new="num_trusted=num_drafted if trusts_draft else 0",
        tests=(SPRINTER,),
    ),
    Mutant(
        name="every-run-trusts-draft",
        file="engine/blocks.py",
        old="num_trusted=max(0, num_drafted - 1) if trusts_draft else 0",
        new="num_trusted=max(0, num_drafted - 1)",
        tests=(IN_TURNS,),
    ),
    Mutant(
        name="one-token-more-trusted-than-said",
        file="engine/verify.py",
        old="arange_segments(num_verified_R) < np.repeat(trusted_R, num_verified_R)",
        new="arange_segments(num_verified_R) <= np.repeat(trusted_R, num_verified_R)",
        tests=(IN_TURNS,),
    ),
    Mutant(
        name="heads-estimate-kept-with-next-token",
        file="engine/draft_features.py",
        old="        self._features.keep_estimates(places, estimates_A.numpy())\n",
        new="        self._features.keep_estimates((places[0], places[1] + 1), estimates_A.numpy())\n",
        tests=(HEADS + "::test_the_trace_has_the_head_s_estimates[greedy-none]",),
    ),
    Mutant(
        name="policy-told-heads-estimate-of-another-row",
        file="engine/draft_features.py",
        old="return DraftFeatures.of_head(estimates_A.numpy())",
        new="return DraftFeatures.of_head(np.roll(estimates_A.numpy(), 1))",
        tests=(SPRINTER,),
    ),
    Mutant(
        name="heads-logit-taken-for-estimate",
        file="models/runner.py",
        old="outputs[:, -1].double().sigmoid()",
        new="outputs[:, -1].double()",
        tests=(HEADS + "::test_the_policy_gets_the_head_s_estimate_of_the_drawn_token",),
    ),
    # Policies.
    Mutant(
        name="token-policy-looked-at-thrown-away",
        file="engine/draft_loop.py",
        old="                keep_A = self._wants_more(draft_batch, active_A, depth, last)\n",
        new="                keep_A = self._wants_more(draft_batch, active_A, depth, last)\n"
        "                if depth:\n"
        "                    num_drafted_R[active_A[~keep_A]] -= 1\n",
        tests=(POLICIES + "[none-confidence]",),
        is_dangerous=True,
    ),
    Mutant(
        name="token-head-doubts-thrown-away",
        file="engine/draft_loop.py",
        old="                if not len(active_A):\n                    break\n                estimates_A = None\n",
        new="                num_drafted_R[np.setdiff1d(np.arange(len(draft_slots_R)), active_A)] -= 1\n"
        "                if not len(active_A):\n                    break\n                estimates_A = None\n",
        tests=(HEADS + "::test_the_output_follows_the_target_s_distribution[plain-none-sprinter]",),
    ),
    Mutant(
        name="token-of-run-kept-after-policy-stopped",
        file="engine/draft_runs.py",
        old="        step = step.select(drafting.goes_on_R[step.active_A])\n        drafting.num_needed",
        new="        drafting.num_needed",
        tests=(RUNS + "[3]",),
    ),
    Mutant(
        name="batch-policy-counts-sequence-that-has-ended",
        file="engine/draft_runs.py",
        old="is_asked = self._unknown is None or not self._decides_for_all",
        new="is_asked = True",
        tests=(RUNS + "[3]",),
    ),
    Mutant(
        name="only-run-keeps-tokens-of-sequence-that-has-ended",
        file="engine/draft_runs.py",
        old="if not drafting.goes_on_R.all():",
        new="if False:",
        tests=(RUNS + "[3]",),
    ),
    Mutant(
        name="first-run-drafts-after-wrong-next-token",
        file="engine/draft_runs.py",
        old="token_ids_T[index] = token_ids_W[lines]",
        new="token_ids_T[index] = token_ids_W[lines.flip(0)]",
        tests=(RUNS + "[3]",),
    ),
    Mutant(
        name="estimate-of-dropped-step-kept",
        file="engine/draft_runs.py",
        old="self._head.known(step.earlier_estimates_A, earlier, is_first=depth == 0)",
        new="self._head.known(step.earlier_estimates_A.flip(0), earlier, is_first=depth == 0)",
        tests=(RUNS + "[3]",),
    ),
    Mutant(
        name="uploads-wait-for-the-device",
        file="sampling/uploads.py",
        old="non_blocking=True",
        new="non_blocking=False",
        tests=(WAITS + "[fixed]",),
    ),
    Mutant(
        name="row-gives-way-loses-policys-history",
        file="engine/histories.py",
        old="self._lines_SH[slot] = self._suspended.pop(name, self._initial_H)",
        new="self._lines_SH[slot] = self._initial_H",
        tests=(HISTORIES,),
    ),
    Mutant(
        name="history-put-aside-as-view-of-slots",
        file="engine/histories.py",
        old="self._lines_SH[slots_R].copy(), strict=True)",
        new="[self._lines_SH[slot] for slot in slots_R], strict=True)",
        tests=(HISTORIES,),
    ),
    Mutant(
        name="blocks-without-candidates-move-history",
        file="engine/histories.py",
        old="verified = np.flatnonzero(num_drafted_R)",
        new="verified = np.arange(len(num_drafted_R))",
        tests=(HISTORIES,),
    ),
    Mutant(
        name="confidence-stops-after-likely-tokens",
        file="policies/confidence.py",
        old="rows.features.probabilities_R >= self.stop_probability",
        new="rows.features.probabilities_R <= self.stop_probability",
        tests=(THRESHOLDS,),
    ),
    Mutant(
        name="adaedl-moves-threshold-wrong-way",
        file="policies/adaedl.py",
        old="np.where(acceptances_R <= target_acceptance, 1, -1)",
        new="np.where(acceptances_R <= target_acceptance, -1, 1)",
        tests=(THRESHOLDS,),
    ),
    Mutant(
        name="gammatune-gives-every-block-bonus",
        file="policies/gammatune.py",
        old="np.where(is_whole_R, self.length_bonus, 0.0)",
        new="self.length_bonus",
        tests=(LENGTHS,),
    ),
    Mutant(
        name="specdecpp-forgets-all-estimates-but-last",
        file="policies/specdecpp.py",
        old="self._survival[draft_slots_R] *= rows.earlier_estimates_R",
        new="self._survival[draft_slots_R] = rows.earlier_estimates_R",
        tests=(HEAD_POLICIES,),
    ),
    Mutant(
        name="specdecpp-draws-nothing-when-it-stops",
        file="policies/specdecpp.py",
        old="needs_last_estimate: ClassVar[bool] = False",
        new="needs_last_estimate: ClassVar[bool] = True",
        tests=(HEADS + "::test_every_draft_pass_is_counted_and_none_is_run_twice",),
    ),
    Mutant(
        name="passes-that-draw-nothing-are-no-waste",
        file="stats/shard.py",
        old="            + self.num_empty_draft_steps\n",
        new="",
        tests=(HEADS + "::test_every_draft_pass_is_counted_and_none_is_run_twice",),
    ),
    Mutant(
        name="drafted-tokens-counted-once-a-run",
        file="engine/reports.py",
        old="self._sizes, self._num_row_steps, self._num_drafted, self._num_forced = [], 0, 0, 0",
        new="self._sizes, self._num_row_steps, self._num_forced = [], 0, 0",
        tests=(IN_TURNS,),
    ),
    Mutant(
        name="specdecpp-carries-blocks-estimates-into-next",
        file="policies/specdecpp.py",
        old="        self._survival[draft_slots_R] = 1.0\n",
        new="",
        tests=(HEAD_POLICIES,),
    ),
    Mutant(
        name="estimate-of-draw-without-its-features",
        file="models/hidden.py",
        old="(torch.logit(estimates_N, eps=LEAST_ESTIMATE) + added_N).sigmoid()",
        new="torch.logit(estimates_N, eps=LEAST_ESTIMATE).sigmoid()",
        tests=(HEADS + "::test_an_estimate_from_the_drawing_state_comes_with_the_draw",),
    ),
    Mutant(
        name="drawing-state-taken-for-that-of-token-before",
        file="engine/draft_features.py",
        old="        if not self._runner.head_reads_drawing_state:\n",
        new="        if self._runner is not None:\n",
        tests=(HEADS + "::test_an_estimate_from_the_drawing_state_comes_with_the_draw",),
    ),
    Mutant(
        name="verifier-collected-from-other-state",
        file="collecting/draft_side.py",
        old="kept_M, hidden_MH = np.arange(len(drawn_N)), drawing_NH",
        new="kept_M, hidden_MH = np.arange(len(drawn_N)), np.roll(drawing_NH, 1, axis=0)",
        tests=("tests/collecting/test_collect.py::test_verifier_examples_are_those_of_plain_forwards",),
    ),
    Mutant(
        name="replay-runs-doubted-token-of-drawing-state",
        file="replay/replay.py",
        old="self._needs_last_estimate and not reads_drawing_state",
        new="self._needs_last_estimate",
        tests=(
            "tests/replay/test_replay.py::test_replayed_counts_are_those_of_a_verifier_of_the_drawing_state",
        ),
    ),
    Mutant(
        name="distance-of-tokens-that-did-not-pass",
        file="theory/sprinter.py",
        old="(passes_N * (1 - acceptances_N)).mean()",
        new="(~passes_N * (1 - acceptances_N)).mean()",
        tests=("tests/theory/test_sprinter.py",),
    ),
    Mutant(
        name="theorem-1-with-another-ratio",
        file="theory/sprinter.py",
        old="passes_N[acceptances_N < 1 - 1e-6].mean()",
        new="passes_N[~is_acceptable_N].mean()",
        tests=("tests/theory/test_sprinter.py",),
    ),
    Mutant(
        name="sprinter-stops-where-verifier-sure",
        file="policies/sprinter.py",
        old="rows.features.estimates_R >= self.verifier_threshold",
        new="rows.features.estimates_R < self.verifier_threshold",
        tests=(HEAD_POLICIES,),
    ),
)
