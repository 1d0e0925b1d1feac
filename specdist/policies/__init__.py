"""Length policies by name: how many tokens to draft for each row."""

from specdist.policies.base import DraftedRows, DraftFeatures, LengthPolicy
from specdist.policies.fixed import FixedLength

__all__ = ["DraftFeatures", "DraftedRows", "FixedLength", "LengthPolicy"]
