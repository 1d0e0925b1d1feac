"""Bytes and operations of a model, computed from its configuration alone."""
