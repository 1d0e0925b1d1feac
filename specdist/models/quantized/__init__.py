"""Quantised linear layers: stored formats, their products, and rounded inputs."""
