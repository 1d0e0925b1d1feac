"""The main job: ranks, costs, memory, rows, shards and totals of a run."""
