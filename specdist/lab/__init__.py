"""What is not part of a run: the planner, the demo pair, and measurements."""
