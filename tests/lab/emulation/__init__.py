"""The engine at a GPU's pace on a machine without one: everything is real but the two models."""
