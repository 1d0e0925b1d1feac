"""Finished rows on their way into part logs and shards, and the last lines of a run."""
