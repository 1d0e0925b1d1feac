"""A run's figures for people: progress, status, last lines, and publishing on the Hugging Face hub."""
