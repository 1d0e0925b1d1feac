"""A run's figures for people: progress, status, totals, and publishing on the Hugging Face hub."""
