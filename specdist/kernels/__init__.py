"""Kernels of the project: Triton for GPUs, C for CPUs."""
