"""Which replica works on which shard: leases, heartbeats, and what a replica takes over from a dead one."""
