"""Finished rows on their way into part logs and shards, and what the check of the target has found."""
