"""Processes that call a user's function between turns (`--rollout`)."""
