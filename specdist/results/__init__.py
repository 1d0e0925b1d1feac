"""What is done with a finished run: evaluation, the report, columns and shows."""
