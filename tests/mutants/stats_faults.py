"""Faults in plans and statistics."""

from tests.mutants.mutant import Mutant

LEDGER = "tests/engine/test_stats_recorder.py"
STATS = "tests/data/stats/test_shard.py"
TRACING = "tests/engine/test_tracing.py::test_tracing_changes_nothing_and_agrees_with_the_statistics[none-greedy]"

ROOFLINE, EXPERTS = "tests/lab/plan/test_roofline.py", "tests/lab/plan/test_experts.py"
SAMPLING, CALIBRATION = "tests/lab/plan/test_sampling.py", "tests/lab/plan/test_calibration.py"
COUNTS = "tests/gpu/test_counts.py::test_a_layer_has_few_kernels"

STATS_FAULTS = (
    # Plans, and what they reckon with.
    Mutant("planner-forgets-kernels-outside-of-layers", "PassCounts.kernels",
        "return num_layers * self.kernels_per_layer + self.kernels_outside_of_layers",
        "return num_layers * self.kernels_per_layer",
        (ROOFLINE,)),
    Mutant("planner-reads-all-experts-for-one-token", "Experts.num_distinct",
        "return self.num_experts * (1 - (1 - self.num_chosen / self.num_experts) ** num_tokens)",
        "return self.num_experts",
        (EXPERTS,)),
    Mutant("planner-fills-no-tiles-of-experts", "Placement.experts_s",
        "model.expert_flops(self.tp_size, num_tokens, EXPERT_TILE_ROWS)",
        "model.expert_flops(self.tp_size, num_tokens)",
        (EXPERTS,)),
    Mutant("planner-halves-the-time-of-float8", "hardware",
        '"float8": Rates(0.35, 0.88)',
        '"float8": Rates(1.0, 2.0)',
        (ROOFLINE,)),
    Mutant("planner-attends-to-whole-prompts", "Placement.prompt_s",
        "self._attention_flops_s(prompt_tokens / 2,",
        "self._attention_flops_s(prompt_tokens,",
        (ROOFLINE,)),
    Mutant("planner-names-options-that-give-nothing", "find_remedies",
        "gain >= WORTHWHILE",
        "True",
        ("tests/lab/plan/test_job.py",)),
    Mutant("planner-calls-sums-over-gpus-confirmed", "_found",
        'yield ASSUMED, f"sums over',
        'yield NEAR, f"sums over',
        ("tests/lab/plan/test_job.py",)),
    Mutant("experts-are-whole-on-every-rank", "ModelSize.weight_bytes",
        "each.rank_bytes(self._parts_of_experts(tp_size), self.bytes_per_number)",
        "each.rank_bytes(1, self.bytes_per_number)",
        (EXPERTS,)),
    Mutant("planner-samples-from-prompts", "roofline_costs",
        "target_prefill = _curve(target.prompt_s, most_tokens)",
        "target_prefill = _curve(lambda tokens: target.pass_s(tokens, min(tokens, num_rows)), most_tokens)",
        (SAMPLING,)),
    Mutant("planner-reads-peers-over-pcie", "Gpu.all_reduce_s",
        "if not reads_peers or self.link_latency_s != NVLINK_LATENCY_S:",
        "if not reads_peers:",
        (ROOFLINE,)),
    Mutant("planner-reads-a-fake-gpus-times", "Calibration.read",
        "if found.is_fake:",
        "if False:",
        (CALIBRATION,)),
    Mutant("attention-copies-cache", "TritonKernel.attend",
        "            key_pages,\n            value_pages,\n            segments.block_table_SP,\n",
        "            key_pages.clone(),\n            value_pages,\n            segments.block_table_SP,\n",
        (COUNTS,)),
    # Statistics.
    Mutant("target-passes-not-counted-for-fit-of-times", "StatsRecorder.record_round",
        "            self._now.num_target_passes + (pass_time is not None),\n",
        "            self._now.num_target_passes,\n",
        (LEDGER,)),
    Mutant("all-drafted-tokens-count-as-accepted", "Stats.observe_block",
        "self.num_accepted_tokens += num_accepted",
        "self.num_accepted_tokens += num_drafted",
        (STATS,)),
    Mutant("hit-counts-all-tokens-of-chain-as-drafted-ahead", "Stats.observe_ahead",
        "self.num_ahead_tokens += 1 if outcome.is_hit else outcome.num_tokens",
        "self.num_ahead_tokens += outcome.num_tokens",
        (STATS,)),
    Mutant("peak-memory-of-two-shards-added-up", "PeakMemory",
        "on one rank of the target; merges as a maximum\", merge=max)",
        "on one rank of the target; merges as a maximum\")",
        (STATS,)),
    Mutant("trace-calls-one-token-more-judged", "Engine._commit_candidates",
        "num_verified = min(num_kept + (reason is None), num_drafted)",
        "num_verified = num_drafted",
        (TRACING,)),
)
