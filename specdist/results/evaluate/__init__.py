"""What jobs/evaluate.py does: scores of completions, and two runs beside each other."""
