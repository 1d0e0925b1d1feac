"""What jobs/tune.py does: collect an exhaustive trace, replay policies on it, and choose one."""
