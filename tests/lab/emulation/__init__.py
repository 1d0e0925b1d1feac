"""The engine at a GPU's pace on a machine without one: all is real but the models, the clock and messages."""
