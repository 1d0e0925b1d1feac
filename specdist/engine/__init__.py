"""Rounds: schedule, draft, verify, commit; draft and target on one rank or on several."""
