"""Stored tensors into the parameters of a rank, plain or quantised, whole or in part."""
