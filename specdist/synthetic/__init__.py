"""Random pairs that agree as often as wanted, for machines and sizes without a trained pair."""

from specdist.synthetic.build import SyntheticRecord, build_synthetic
from specdist.synthetic.config import SyntheticConfig, check_dial
from specdist.synthetic.random_llama import SHAPES, Shape

__all__ = ["SHAPES", "Shape", "SyntheticConfig", "SyntheticRecord", "build_synthetic", "check_dial"]
