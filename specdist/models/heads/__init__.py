"""Heads on the draft's hidden states that predict acceptance: format, layers and measures."""
