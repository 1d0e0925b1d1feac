"""The package from Python: generation on one device, and runs that are read."""
