"""What forwards and rounds take on this machine, and how much memory is left for the cache."""
