"""Forwards of a model: eager, recorded in graphs, fused, compiled for a CPU."""
