"""The demo pair: a target and a draft trained on text that every Python installation carries."""
