"""Prompts in; shards, part logs and the run folder out. Imports no torch."""
