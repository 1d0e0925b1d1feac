"""Faults in the sharing of the last shards, and in the order in which rows begin."""

from tests.mutants.mutant import Mutant

SUB_SHARDS = "tests/job/test_sub_shards.py"
NO_ROW_TWICE = f"{SUB_SHARDS}::test_replicas_without_a_shard_take_rows_of_others_and_no_row_twice"
LOST_LEASES = f"{SUB_SHARDS}::test_rows_of_sub_shards_whose_leases_are_gone_are_the_shards_again"
OF_QUEUE = (
    "tests/data/test_shard_queue.py::"
    "test_a_sub_shard_is_one_replicas_at_a_time_and_its_rows_are_read_by_whoever_has_the_shard"
)

SUB_SHARD_FAULTS = (
    Mutant("sub-shard-row-generated-twice", "WorkQueue._offer",
        "work.pending = deque(row for row in work.pending if row not in offered)",
        "work.pending = deque(work.pending)",
        (NO_ROW_TWICE,)),
    Mutant("sub-shard-row-lost-with-its-lease", "WorkQueue._settle_sub_shards",
        "work.pending.extend(missing)",
        "work.pending.extend(missing[1:])",
        (LOST_LEASES,)),
    Mutant("work-of-sub-shards-not-counted", "ShardWriter.write",
        "            counted.add(Stats.from_json(found))\n",
        "            Stats.from_json(found)\n",
        (NO_ROW_TWICE,)),
    Mutant("new-holder-of-a-shard-generates-rows-of-its-sub-shards", "RunFolder.parts",
        "beside = [log.path for log in logs if log.sub_shard != sub_shard]",
        "beside: list[Path] = []",
        (OF_QUEUE,)),
    Mutant("sub-shard-offered-of-a-lost-shard", "ShardQueue.offer",
        "            if not self._leases.is_held(leased.lease):\n                self._leases.forget(offered.name)",
        "            if False:\n                self._leases.forget(offered.name)",
        ("tests/data/test_shard_queue.py::test_a_sub_shard_of_a_shard_that_was_lost_meanwhile_is_not_offered",)),
    Mutant("shortest-rows-first", "ExpectedLengths.longest_first",
        "return sorted(rows, key=self._expected, reverse=True)",
        "return sorted(rows, key=self._expected)",
        (f"{SUB_SHARDS}::test_finished_samples_tell_the_length_of_a_rows_others",)),
    Mutant("shard-is-taken-from-holder-that-began-meanwhile", "ShardQueue._lease",
        "        if above and self._leases.is_leased(name):\n",
        "        if False:\n",
        ("tests/data/test_shard_queue.py",)),
)
