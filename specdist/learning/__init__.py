"""What a draft learns from, and how it is judged: by `jobs/distill.py`, and while a run goes on"""
