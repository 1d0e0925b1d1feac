"""Length policies replayed on a trace, without any model. Imports no torch."""

from specdist.replay.batch import ReplaySettings
from specdist.replay.replay import Oracle, ReplayResult, replay
from specdist.replay.trace import ExhaustiveTrace, PromptTrace

__all__ = ["ExhaustiveTrace", "Oracle", "PromptTrace", "ReplayResult", "ReplaySettings", "replay"]
