"""Readers of prompt datasets: Arrow, Parquet, JSON, CSV and text as the same rows with their numbers."""
