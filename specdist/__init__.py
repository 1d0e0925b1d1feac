"""Offline batch text generation by exact, adaptive speculative decoding.

:class:`SpeculativeLLM` generates from Python on one device, :func:`generate` on all GPUs of a machine;
:func:`load_run` opens the folder of a run of ``jobs/generate.py``; :mod:`rollout` is for functions between
turns. They are imported when they are asked for, so ``import specdist`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdist import rollout
    from specdist.config.calls import SamplingOptions
    from specdist.llm import GeneratedText, SpeculativeLLM
    from specdist.replicas import Generation, generate
    from specdist.results.runs import Run, load_run

__all__ = [
    "GeneratedText", "Generation", "Run", "SamplingOptions", "SpeculativeLLM", "generate", "load_run",
    "rollout",
]  # fmt: skip

_PLACES = {
    "GeneratedText": ("specdist.llm", "GeneratedText"),
    "Generation": ("specdist.replicas", "Generation"),
    "Run": ("specdist.results.runs", "Run"),
    "SamplingOptions": ("specdist.config.calls", "SamplingOptions"),
    "SpeculativeLLM": ("specdist.llm", "SpeculativeLLM"),
    "generate": ("specdist.replicas", "generate"),
    "load_run": ("specdist.results.runs", "load_run"),
    "rollout": ("specdist.rollout", ""),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place, attribute = _PLACES[name]
    module = import_module(place)
    return getattr(module, attribute) if attribute else module


def __dir__() -> list[str]:
    return sorted(__all__)
