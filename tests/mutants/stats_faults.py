"""Faults in plans and statistics."""

from tests.mutants.mutant import Mutant

LEDGER = "tests/engine/test_stats_recorder.py"
STATS = "tests/stats/test_shard.py"
TRACING = "tests/engine/test_tracing.py::test_tracing_changes_nothing_and_agrees_with_the_statistics[none-greedy-fixed]"

ROOFLINE = "tests/planning/test_roofline.py"
COUNTS = "tests/gpu/test_counts.py::test_the_last_line_has_what_is_counted_and_it_is_no_worse"

STATS_FAULTS = (
    # Plans, and what they reckon with.
    Mutant(
        name="planner-forgets-kernels-outside-of-layers",
        file="planning/counted.py",
        old="return num_layers * self.kernels_per_layer + self.kernels_outside_of_layers",
        new="return num_layers * self.kernels_per_layer",
        tests=(ROOFLINE,),
    ),
    Mutant(
        name="planner-pays-for-one-layers-tensors",
        file="planning/roofline.py",
        old="            num_layers\n            * self.counts.tensors_per_layer\n",
        new="            self.counts.tensors_per_layer\n",
        tests=(ROOFLINE,),
    ),
    Mutant(
        name="attention-copies-cache",
        file="models/kernel.py",
        old="            key_pages,\n            value_pages,\n            segments.block_table_SP,\n",
        new="            key_pages.clone(),\n            value_pages,\n            segments.block_table_SP,\n",
        tests=(COUNTS,),
    ),
    # Statistics.
    Mutant(
        name="target-passes-not-counted-for-fit-of-times",
        file="engine/stats_recorder.py",
        old="            self._now.num_target_passes + (pass_time is not None),\n",
        new="            self._now.num_target_passes,\n",
        tests=(LEDGER,),
    ),
    Mutant(
        name="fit-leaves-out-drafts-time",
        file="engine/stats_recorder.py",
        old="self._now.decoding_ns + target.verify + reply.times.draft",
        new="self._now.decoding_ns + target.verify",
        tests=(LEDGER,),
    ),
    Mutant(
        name="fit-counts-passes-before-row-began",
        file="engine/stats_recorder.py",
        old="num_target_passes=self._now.num_target_passes - mark.num_target_passes,",
        new="num_target_passes=self._now.num_target_passes,",
        tests=(LEDGER,),
    ),
    Mutant(
        name="shards-completion-counts-no-prompt-tokens",
        file="engine/stats_recorder.py",
        old="        stats.num_prompt_tokens += sequence.num_prompt_tokens\n",
        new="",
        tests=(LEDGER,),
    ),
    Mutant(
        name="all-drafted-tokens-count-as-accepted",
        file="stats/shard.py",
        old="self.num_accepted_tokens += num_accepted",
        new="self.num_accepted_tokens += num_drafted",
        tests=(STATS,),
    ),
    Mutant(
        name="acceptance-by-position-counts-what-drafted",
        file="stats/shard.py",
        old="for position in range(num_accepted):",
        new="for position in range(num_drafted):",
        tests=(STATS,),
    ),
    Mutant(
        name="hit-counts-all-tokens-of-chain-as-drafted-ahead",
        file="stats/shard.py",
        old="self.num_ahead_tokens += 1 if outcome.is_hit else outcome.num_tokens",
        new="self.num_ahead_tokens += outcome.num_tokens",
        tests=(STATS,),
    ),
    Mutant(
        name="rank-of-branch-counts-from-0",
        file="stats/shard.py",
        old="_add_to(self.num_branch_hits_per_rank, outcome.branch_rank - 1, 1)",
        new="_add_to(self.num_branch_hits_per_rank, outcome.branch_rank, 1)",
        tests=(STATS,),
    ),
    Mutant(
        name="trusted-tokens-count-as-judged",
        file="stats/shard.py",
        old="num_accepted = self.num_accepted_tokens - self.num_trusted_tokens + self.num_ahead_hits",
        new="num_accepted = self.num_accepted_tokens + self.num_ahead_hits",
        tests=(STATS,),
    ),
    Mutant(
        name="peak-memory-of-two-shards-added-up",
        file="stats/shard.py",
        old="mine.target, mine.draft = max(mine.target, theirs.target), max(mine.draft, theirs.draft)",
        new="mine.target, mine.draft = mine.target + theirs.target, mine.draft + theirs.draft",
        tests=(STATS,),
    ),
    Mutant(
        name="proportional-parts-lose-their-remainders",
        file="stats/shard.py",
        old="        parts[key], given = upto - given, upto\n",
        new="        parts[key] = amount * weight // total\n",
        tests=(STATS,),
    ),
    Mutant(
        name="trace-calls-one-token-more-judged",
        file="engine/engine.py",
        old="num_verified = min(num_kept + (reason is None), num_drafted)",
        new="num_verified = num_drafted",
        tests=(TRACING,),
    ),
)
