"""The demo pair: a target and a draft trained on text that every Python installation carries."""

from specdist.demo.pair import PairConfig, PairRecord, build_pair
from specdist.demo.text import load_corpus

__all__ = ["PairConfig", "PairRecord", "build_pair", "load_corpus"]
