"""What a terminal shows only where it is asked for: a command's JSON document, and all that it logs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

JSON, VERBOSE = "--json", "--verbose"
_asked = frozenset[str]()


def take_flags(words: Sequence[str], *, is_rank: bool = False) -> list[str]:
    """A command's arguments without ``--json``, and ``--verbose`` where it may be one of several ranks."""
    global _asked
    flags = frozenset({JSON, *([VERBOSE] if is_rank else [])})
    _asked = flags & {*words}
    return [word for word in words if word not in flags]


def is_brief() -> bool:
    """Whether a terminal shows a summary of what is logged."""
    return sys.stderr.isatty() and VERBOSE not in _asked


def print_document(document: Mapping[str, Any], *texts: str, sep: str = "\n") -> None:
    """Print texts for people, and the document after them for programs."""
    is_shown = JSON in _asked or not sys.stdout.isatty()
    print(*texts, *([json.dumps(document)] if is_shown else []), sep=sep)  # noqa: T201 (the result)
