"""What a run would take before any GPU is used: ``jobs/plan.py``."""
