"""Forwards of the target in one process, or sharded over several ranks."""
