"""Training examples for heads, from target and draft: ``jobs/collect.py``."""
