"""Faults in who takes a shard."""

from tests.mutants.mutant import Mutant

ENDING_FAULTS = (
    Mutant("shard-is-taken-from-holder-that-began-meanwhile", "ShardQueue._lease",
        "        if above and self._leases.in_force(name):\n",
        "        if False:\n",
        ("tests/data/test_shard_queue.py",)),
)
