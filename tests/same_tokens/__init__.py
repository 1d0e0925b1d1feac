"""Compares the tokens of small jobs between this tree and a commit: see :mod:`tests.same_tokens.__main__`."""
