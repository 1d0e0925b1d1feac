"""Filters, keyed random numbers and acceptance rules, for target and draft alike."""
