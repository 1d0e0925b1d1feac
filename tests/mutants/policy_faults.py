"""Faults in policies, heads and lossy runs."""

from tests.mutants.mutant import Mutant
from tests.mutants.sampling_faults import SYNCHRONOUS

POLICIES = "tests/engine/test_policies.py::test_output_follows_the_target_s_distribution"
SPRINTER = "tests/engine/test_sprinter.py::test_lossy_greedy_tokens_are_those_of_the_mechanism"
HEADS = "tests/engine/test_heads.py"
AT_ONCE = "tests/engine/test_goodput.py::test_asked_after_several_steps_it_drafts_the_same_blocks"
RUNS = "tests/engine/test_runs.py"
WAITS = "tests/gpu/test_counts.py::test_the_host_waits_once_for_a_pass_and_twice_or_less_for_a_draft"
HISTORIES = "tests/engine/test_feedback.py"
THRESHOLDS = "tests/policies/test_thresholds.py"
HEAD_POLICIES = "tests/policies/test_heads.py"
REHEARSAL = "tests/job/test_rehearsal.py::test_a_slow_host_is_found_where_it_is_slow"
GOODPUT = "tests/policies/test_goodput_learning.py"

POLICY_FAULTS = (
    # Heads and lossy runs.
    Mutant("lossy-run-trusts-last-token-of-block-too", "_verify_blocks",
        "num_R.repeat(num_R) - 1",
        "num_R.repeat(num_R)",
        (SPRINTER,)),
    Mutant("every-run-trusts-draft", "NewBlocks.of",
        "trusts_draft=trusts_draft,",
        "trusts_draft=True,",
        (SYNCHRONOUS,)),
    Mutant("policy-told-heads-estimate-of-another-row", "DraftLoop._ask",
        "features = dataclasses.replace(features, estimates=columns_CDA[-1])",
        "features = dataclasses.replace(features, estimates=np.roll(columns_CDA[-1], 1, axis=1))",
        (SPRINTER,)),
    # Policies.
    Mutant("token-policy-looked-at-thrown-away", "DraftLoop._ask",
        "        drafting.shorten(index_A, self._policy.wants(asked))\n",
        ("        lengths_A = self._policy.wants(asked)\n"
         "        drafting.shorten(index_A, lengths_A - (lengths_A <= num_drafted))\n"),
        (POLICIES + "[none-confidence]",), is_dangerous=True),
    Mutant("token-of-run-kept-after-policy-stopped", "DraftLoop._ask",
        "drafting.shorten(index_A, self._policy.wants(asked))",
        "drafting.shorten(index_A, np.maximum(self._policy.wants(asked), drafting.num_steps))",
        (RUNS,)),
    Mutant("only-run-keeps-tokens-of-sequence-that-has-ended", "DraftLoop._collect_steps",
        "            drafting.num_wanted_R[is_over_R] = 0\n",
        "",
        (RUNS,)),
    Mutant("first-run-drafts-after-wrong-next-token", "DraftRuns._catch_up",
        "token_ids_T[index] = token_ids_W[lines]",
        "token_ids_T[index] = token_ids_W[lines.flip(0)]",
        (RUNS,)),
    Mutant("uploads-wait-for-the-device", "upload",
        "non_blocking=True",
        "non_blocking=False",
        (WAITS,)),
    Mutant("row-gives-way-loses-policys-history", "PolicyState.open",
        "self._lines_SH[slot] = self._suspended.pop(stream_key, self._initial_H)",
        "self._lines_SH[slot] = self._initial_H",
        (HISTORIES,)),
    Mutant("confidence-stops-after-likely-tokens", "ConfidenceThreshold.goes_on",
        "features.probabilities >= self.stop_probability",
        "features.probabilities <= self.stop_probability",
        (THRESHOLDS,)),
    Mutant("specdecpp-forgets-all-estimates-but-last", "SpecDecPlusPlus.wants",
        "        survival_DR[0] *= self._survival[draft_slots_R]\n",
        "",
        (HEAD_POLICIES,)),
    Mutant("estimate-of-draw-without-its-features", "HiddenStateHead.estimates_of_draws",
        "(torch.logit(estimates_N, eps=LEAST_ESTIMATE) + added_N).sigmoid()",
        "torch.logit(estimates_N, eps=LEAST_ESTIMATE).sigmoid()",
        (HEADS + "::test_an_estimate_from_the_drawing_state_comes_with_the_draw",)),
    Mutant("verifier-collected-from-other-state", "DraftSide._score_group",
        "kept_M, hidden_MH = np.arange(len(drawn_N)), drawing_NH",
        "kept_M, hidden_MH = np.arange(len(drawn_N)), np.roll(drawing_NH, 1, axis=0)",
        ("tests/training/collect/test_collect.py::test_verifier_examples_are_those_of_plain_forwards",)),
    Mutant("goodput-compares-every-sequence-with-the-rate-of-all", "Goodput._begin",
        "round.num_rows + self._worth[rows.draft_slots_R].sum(axis=0)",
        "round.num_rows + num_rows * (self._forecast.of_all**self._steps_D).cumsum()",
        ("tests/policies/test_goodput.py",)),
    Mutant("goodput-never-tries-a-draft-of-which-much-must-be-accepted", "calibration.PRIOR_ACCEPTANCE",
        "PRIOR_ACCEPTANCE, PRIOR_TOKENS, NUM_TELLING = 0.8, 8, 24",
        "PRIOR_ACCEPTANCE, PRIOR_TOKENS, NUM_TELLING = 0.6, 32, 24",
        (GOODPUT,)),
    Mutant("goodput-assumes-the-same-for-ever", "Forecast.observe",
        "        self._prior_tokens *= kept\n",
        "",
        (GOODPUT,)),
    Mutant("prompts-that-were-put-off-cost-nothing", "Goodput._run_prompts",
        "self._costs.context.draft_prefill_ns * rows.put_off.num_missing_R / num_rounds_R",
        "0.0 * num_rounds_R",
        (GOODPUT,)),
    Mutant("acceptance-is-found-out-with-whichever-sequences", "exploration.cheapest_exploration",
        " + prompts_ns_R[:, None]",
        "",
        (GOODPUT,)),
    Mutant("steps-of-all-are-launched-although-prompts-are-put-off", "DraftLoop.launch",
        " and not draft_batch.has_prompts_left",
        "",
        ("tests/lab/emulation/test_virtual.py::test_a_short_run_is_not_slower_than_the_target_alone",)),
    Mutant("costs-leave-out-what-the-host-does-between-steps", "rehearsal.rehearsed_costs",
        "round(ns + step_ns) for ns in",
        "round(ns) for ns in",
        (REHEARSAL,)),
    Mutant("costs-keep-what-is-assumed-of-drafting", "rehearsal.rehearsed_costs",
        "synchronous=Curve([1], [round(beyond_steps_ns)]),",
        "",
        (REHEARSAL,)),
    Mutant("plans-count-sequences-that-end-on-the-way", "Goodput.wants",
        "                goes_on_R &= rows.most_R > length\n",
        "                pass\n",
        (AT_ONCE,)),
    Mutant("batch-policy-counts-sequence-that-has-ended", "DraftLoop.launch",
        "is_known = self._runs.pending is None or not self._policy.is_for_batch",
        "is_known = True",
        (AT_ONCE,)),
)
