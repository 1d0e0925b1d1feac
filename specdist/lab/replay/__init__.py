"""Length policies replayed on a trace, without any model. Imports no torch."""

from specdist.lab.replay.replay import Oracle, ReplayResult, ReplaySettings, replay
from specdist.lab.replay.trace import ExhaustiveTrace, PromptTrace

__all__ = ["ExhaustiveTrace", "Oracle", "PromptTrace", "ReplayResult", "ReplaySettings", "replay"]
