"""Candidates without a draft model: n-grams of texts."""
