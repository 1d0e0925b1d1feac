"""Length policies by name: how many tokens to draft for each row."""

from specdist.policies.base import LengthPolicy
from specdist.policies.fixed import FixedLength

__all__ = ["FixedLength", "LengthPolicy"]
