"""Faults in plans and statistics."""

from tests.mutants.mutant import Mutant

LEDGER = "tests/engine/test_stats_recorder.py"
STATS = "tests/stats/test_shard.py"
TRACING = "tests/engine/test_tracing.py::test_tracing_changes_nothing_and_agrees_with_the_statistics[none-greedy-fixed]"

ROOFLINE = "tests/planning/test_roofline.py"
COUNTS = "tests/gpu/test_counts.py::test_the_last_line_has_what_is_counted_and_it_is_no_worse"

STATS_FAULTS = (
    # Plans, and what they reckon with.
    Mutant("planner-forgets-kernels-outside-of-layers", "PassCounts.kernels",
        "return num_layers * self.kernels_per_layer + self.kernels_outside_of_layers",
        "return num_layers * self.kernels_per_layer",
        (ROOFLINE,)),
    Mutant("planner-pays-for-one-layers-tensors", "Placement.overhead_s",
        "            num_layers\n            * self.counts.tensors_per_layer\n",
        "            self.counts.tensors_per_layer\n",
        (ROOFLINE,)),
    Mutant("attention-copies-cache", "TritonKernel.attend",
        "            key_pages,\n            value_pages,\n            segments.block_table_SP,\n",
        "            key_pages.clone(),\n            value_pages,\n            segments.block_table_SP,\n",
        (COUNTS,)),
    # Statistics.
    Mutant("target-passes-not-counted-for-fit-of-times", "StatsRecorder.record_round",
        "            self._now.num_target_passes + (pass_time is not None),\n",
        "            self._now.num_target_passes,\n",
        (LEDGER,)),
    Mutant("fit-leaves-out-drafts-time", "StatsRecorder.record_round",
        "self._now.decoding_ns + target.verify + reply.times.draft",
        "self._now.decoding_ns + target.verify",
        (LEDGER,)),
    Mutant("fit-counts-passes-before-row-began", "StatsRecorder.record_completion",
        "num_target_passes=self._now.num_target_passes - mark.num_target_passes,",
        "num_target_passes=self._now.num_target_passes,",
        (LEDGER,)),
    Mutant("shards-completion-counts-no-prompt-tokens", "StatsRecorder.record_completion",
        "        stats.num_prompt_tokens += sequence.num_prompt_tokens\n",
        "",
        (LEDGER,)),
    Mutant("all-drafted-tokens-count-as-accepted", "Stats.observe_block",
        "self.num_accepted_tokens += num_accepted",
        "self.num_accepted_tokens += num_drafted",
        (STATS,)),
    Mutant("acceptance-by-position-counts-what-drafted", "Stats.observe_block",
        "for position in range(num_accepted):",
        "for position in range(num_drafted):",
        (STATS,)),
    Mutant("hit-counts-all-tokens-of-chain-as-drafted-ahead", "Stats.observe_ahead",
        "self.num_ahead_tokens += 1 if outcome.is_hit else outcome.num_tokens",
        "self.num_ahead_tokens += outcome.num_tokens",
        (STATS,)),
    Mutant("rank-of-branch-counts-from-0", "Stats.observe_ahead",
        "_add_to(self.num_branch_hits_per_rank, outcome.branch_rank - 1, 1)",
        "_add_to(self.num_branch_hits_per_rank, outcome.branch_rank, 1)",
        (STATS,)),
    Mutant("trusted-tokens-count-as-judged", "Stats.verified_acceptance_rate",
        "num_accepted = self.num_accepted_tokens - self.num_trusted_tokens + self.num_ahead_hits",
        "num_accepted = self.num_accepted_tokens + self.num_ahead_hits",
        (STATS,)),
    Mutant("peak-memory-of-two-shards-added-up", "_merge",
        "mine.target, mine.draft = max(mine.target, theirs.target), max(mine.draft, theirs.draft)",
        "mine.target, mine.draft = mine.target + theirs.target, mine.draft + theirs.draft",
        (STATS,)),
    Mutant("proportional-parts-lose-their-remainders", "split_proportionally",
        "        parts[key], given = upto - given, upto\n",
        "        parts[key] = amount * weight // total\n",
        (STATS,)),
    Mutant("trace-calls-one-token-more-judged", "Engine._commit_candidates",
        "num_verified = min(num_kept + (reason is None), num_drafted)",
        "num_verified = num_drafted",
        (TRACING,)),
)
