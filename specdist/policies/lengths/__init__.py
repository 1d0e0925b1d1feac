"""Policies that choose how many tokens to draft: counted, goodput, thresholds, heads."""
