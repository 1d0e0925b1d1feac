"""Forwards on a CPU: compiled C code for the whole model, and faster linear layers."""
