"""Faults in who may work on what: leases, heartbeats, replicas that join, wait and leave."""

from tests.mutants.mutant import Mutant

CHOICE = "tests/data/test_shard_choice.py"
LEASES = "tests/data/test_leases.py"
MEMBERSHIP = "tests/data/test_membership.py"

LEASE_FAULTS = (
    Mutant("one-pause-is-silence", "MAX_FAR_LOOKS",
        "MAX_FAR_LOOKS = 4",
        "MAX_FAR_LOOKS = 1",
        (LEASES,)),
    Mutant("old-look-at-leases-wins-lease", "Leases.take",
        "        if found[-1:] != [lease] or (latest",
        "        if (latest",
        (LEASES,)),
    Mutant("lease-taken-from-who-holds-it", "Leases._is_free",
        "if holding.replica is None or self._watch.is_gone(holding.replica):",
        "if True:",
        (LEASES,)),
    Mutant("heartbeat-read-more-often-than-it-beats", "Watch.is_at_work",
        "is_read = last is None or",
        "is_read = True or",
        (LEASES + "::test_a_heartbeat_is_read_no_more_often_than_it_beats",)),
    Mutant("who-takes-lease-removes-it", "Leases._trim",
        "other.generation < lease.generation:\n                self._remove(other)",
        "other.generation <= lease.generation:\n                self._remove(other)",
        (LEASES,)),
    Mutant("lowest-lease-in-force", "Leases.look",
        "in_order = sorted(leases, key=lambda lease: lease.generation)",
        "in_order = sorted(leases, key=lambda lease: -lease.generation)",
        (LEASES,)),
    Mutant("holder-of-lease-never-read-again", "Leases._is_free",
        "if holder is not None and num_looks < MAX_LOOKS and",
        "if holder is not None and",
        (LEASES,)),
)
