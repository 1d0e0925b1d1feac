"""A checkpoint's files: configuration, weight files, adapters, generation settings."""
