"""Asynchronous drafting: branches that the draft prepares while the target verifies."""
