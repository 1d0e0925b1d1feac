"""Heads trained on collected examples: ``jobs/train_head.py``."""
