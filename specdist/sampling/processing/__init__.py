"""Logits processors and filters: options of a row, penalties, top-k, top-p, masks."""
