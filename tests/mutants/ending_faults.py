"""Faults in who takes a shard, and in the order in which rows begin."""

from tests.mutants.mutant import Mutant

ENDING_FAULTS = (
    Mutant("shortest-rows-first", "ExpectedLengths.longest_first",
        "return sorted(rows, key=self._expected, reverse=True)",
        "return sorted(rows, key=self._expected)",
        ("tests/job/test_ending.py::test_finished_samples_tell_the_length_of_a_rows_others",)),
    Mutant("shard-is-taken-from-holder-that-began-meanwhile", "ShardQueue._lease",
        "        if above and self._leases.is_leased(name):\n",
        "        if False:\n",
        ("tests/data/test_shard_queue.py",)),
)
