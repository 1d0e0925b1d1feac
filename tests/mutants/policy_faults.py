"""Faults in policies, heads and lossy runs."""

from tests.mutants.mutant import Mutant
from tests.mutants.sampling_faults import IN_TURNS

POLICIES = "tests/engine/test_policies.py::test_output_follows_the_target_s_distribution"
SPRINTER = "tests/engine/test_sprinter.py::test_lossy_output_follows_the_distribution_of_the_mechanism"
HEADS = "tests/engine/test_heads.py"
AT_ONCE = "tests/engine/test_goodput.py::test_asked_after_several_steps_it_drafts_the_same_blocks"
RUNS = "tests/gpu/test_waits.py::test_how_late_a_policy_is_asked_changes_no_row"
WAITS = "tests/gpu/test_waits.py::test_the_host_waits_twice_or_less_for_a_draft_and_once_for_a_pass"
HISTORIES = "tests/engine/test_histories.py"
THRESHOLDS = "tests/policies/test_thresholds.py"
HEAD_POLICIES = "tests/policies/test_heads.py"
LENGTHS = "tests/policies/test_lengths.py"
GOODPUT = "tests/policies/test_goodput_learning.py"

POLICY_FAULTS = (
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
        old="arange_segments(num_verified_R) < trusted_R.repeat(num_verified_R)",
        new="arange_segments(num_verified_R) <= trusted_R.repeat(num_verified_R)",
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
        file="engine/draft_steps.py",
        old="DraftFeatures.of_head(estimates_A)",
        new="DraftFeatures.of_head(np.roll(estimates_A, 1))",
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
        old="                keep_A = self._answer(draft_batch, active_A, depth, last and self._told(last))\n",
        new="                keep_A = self._answer(draft_batch, active_A, depth, last and self._told(last))\n"
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
    Mutant(
        name="goodput-compares-every-sequence-with-the-rate-of-all",
        file="policies/goodput.py",
        old="round.num_rows + self._worth[rows.draft_slots_R].sum(axis=0)",
        new="round.num_rows + num_rows * (self._forecast**self._steps_D).cumsum()",
        tests=("tests/policies/test_goodput.py",),
    ),
    Mutant(
        name="goodput-never-tries-a-draft-of-which-much-must-be-accepted",
        file="policies/goodput.py",
        old="PRIOR_ACCEPTANCE, PRIOR_TOKENS = 0.9, 32",
        new="PRIOR_ACCEPTANCE, PRIOR_TOKENS = 0.7, 32",
        tests=(GOODPUT,),
    ),
    Mutant(
        name="goodput-takes-long-to-give-up-its-first-assumption",
        file="policies/goodput.py",
        old="PRIOR_ACCEPTANCE, PRIOR_TOKENS = 0.9, 32",
        new="PRIOR_ACCEPTANCE, PRIOR_TOKENS = 0.9, 512",
        tests=(GOODPUT,),
    ),
    Mutant(
        name="goodput-assumes-the-same-for-ever",
        file="policies/goodput.py",
        old="        self._prior_tokens *= kept\n",
        new="",
        tests=(GOODPUT,),
    ),
    Mutant(
        name="goodput-assumes-nothing-again-after-a-pause",
        file="policies/goodput.py",
        old="        self._prior_tokens += (1 - kept) * (PRIOR_TOKENS - self._prior_tokens)\n",
        new="",
        tests=(GOODPUT,),
    ),
    Mutant(
        name="steps-taken-at-once-go-past-a-stop-token",
        file="engine/draft_runs.py",
        old="if is_stop_DA.any():",
        new="if False:",
        tests=(AT_ONCE,),
    ),
    Mutant(
        name="steps-taken-at-once-go-past-what-is-wanted",
        file="engine/draft_runs.py",
        old="min()) - depth - 1",
        new="min()) - depth",
        tests=(AT_ONCE,),
    ),
    Mutant(
        name="chances-of-steps-that-were-not-taken-at-once",
        file="policies/goodput.py",
        old="survival_DR[found - 1]",
        new="survival_DR[-1]",
        tests=("tests/policies/test_goodput_runs.py",),
    ),
    Mutant(
        name="steps-asked-at-once-have-the-first-one-s-room",
        file="policies/goodput.py",
        old="max(0, room - step) :]",
        new="room:]",
        tests=("tests/policies/test_goodput_runs.py",),
    ),
    Mutant(
        name="steps-asked-at-once-take-no-time",
        file="policies/goodput.py",
        old="spent_D[0] = self._drafting_ns",
        new="spent_D[:] = self._drafting_ns, *[0] * (most_asked - 1)",
        tests=("tests/policies/test_goodput_runs.py",),
    ),
)
