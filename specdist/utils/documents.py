"""A command's JSON document, its last line on stdout: on a terminal only where it is asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

OPTION = "--json"
_asked = False


def take_option(words: Sequence[str]) -> list[str]:
    """A command's arguments without ``--json``, which holds for all commands."""
    global _asked
    _asked = OPTION in words
    return [word for word in words if word != OPTION]


def print_document(document: Mapping[str, Any], *texts: str, sep: str = "\n") -> None:
    """Print texts for people, and the document after them for programs."""
    is_shown = _asked or not sys.stdout.isatty()
    print(*texts, *([json.dumps(document)] if is_shown else []), sep=sep)  # noqa: T201 (the result)
