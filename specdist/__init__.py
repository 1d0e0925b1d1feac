"""Offline batch text generation by adaptive speculative decoding.

:func:`load_run` opens the folder of a run. It is imported when it is asked for, so
``import specdist`` costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdist.api.runs import Run, load_run

__all__ = ["Run", "load_run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from specdist import runs

    return getattr(runs, name)
