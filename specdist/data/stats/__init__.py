"""Statistics that add up, of a shard and of a run."""
