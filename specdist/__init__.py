"""Offline batch text generation by exact, adaptive speculative decoding.

:class:`SpeculativeLLM` generates from Python on one device; :func:`load_run` opens the folder of a run of
``jobs/generate.py``. Both are imported when they are asked for, so ``import specdist`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdist.api.llm import GeneratedText, SpeculativeLLM
    from specdist.api.runs import Run, load_run
    from specdist.config.groups import CompletionOptions as SamplingOptions

__all__ = ["GeneratedText", "Run", "SamplingOptions", "SpeculativeLLM", "load_run"]

_PLACES = {
    "GeneratedText": ("specdist.api.llm", "GeneratedText"),
    "Run": ("specdist.api.runs", "Run"),
    "SamplingOptions": ("specdist.config.groups", "CompletionOptions"),
    "SpeculativeLLM": ("specdist.api.llm", "SpeculativeLLM"),
    "load_run": ("specdist.api.runs", "load_run"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return getattr(import_module(module), attribute)
