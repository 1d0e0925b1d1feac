"""Text of others inside Markdown, which must not become markup there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any


def plain(text: str) -> str:
    """Text that means itself, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>#|&!~])", r"\\\1", " ".join(text.split()))


def code(value: Any) -> str:
    """A value as code, whatever is in it, also in a table's cell; what is not a text is shown as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = re.sub(r"\s", " ", text).replace("|", "\\|")
    if not text.strip():
        return "(empty)"
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{space}{text}{space}{fence}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
