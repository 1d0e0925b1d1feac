"""Drafts trained on what the target says: ``jobs/distill.py``."""
