"""The program of a HumanEval answer: the problem's code, the answer's, and the test, in one text."""

from __future__ import annotations

import ast
import json
import re
import textwrap
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
INDENTED = re.compile(r"(?:\s*\n)?(?: {2}|\t)\s*\S")
FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)
# What a problem consists of; a line of prose may parse as an expression.
PARTS = (
    ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign
)  # fmt: skip


def program_of(problem: str, answer: str, row: Mapping[str, Any]) -> str:
    """``row``: with ``entry_point``, the function's name, and ``test``.

    A fenced block with the whole function runs after the problem's code, since the problem's imports and
    helpers belong to it; the function itself is defined anew. Any other answer goes on where the problem
    ends, as in the reference implementation.
    """
    name = row["entry_point"]
    blocks = [textwrap.dedent(block) for block in FENCED.findall(answer)]
    block = next((block for block in blocks if _place(name, block) is not None), None)
    if block is None:
        program = problem + body_of(answer)
    else:
        program = "\n".join(part for part in (problem_code(problem, name), block) if part)
        # These must come first.
        future = [line.rstrip("\n") + "\n" for line in FUTURE.findall(program)]
        program = "".join(future) + FUTURE.sub("", program)
    return f"{program}\n{row['test']}\ncheck({name})"


def body_of(answer: str) -> str:
    """What continues a problem: indented lines, up to the end of a fence that the prompt has begun or in a
    fence of their own; else all of the answer."""
    bodies = [answer.partition("```")[0], *FENCED.findall(answer)]
    return next((body for body in bodies if INDENTED.match(body)), answer)


@lru_cache(maxsize=1024)
def problem_code(text: str, name: str) -> str:
    """The code around the function ``name`` in a problem's text, which may have prose or a chat template's
    markers about it; empty without such a function. A function without a body gets one."""
    lines = text.splitlines()
    place = _place(name, text)
    if place is None:
        return ""
    first = text.count("\n", 0, place)
    for end in range(len(lines), first, -1):
        for body in ("", "\n    pass"):
            if _is_code("\n".join(lines[first:end]) + body):
                starts = (start for start in range(first + 1) if _is_code("\n".join(lines[start:end]) + body))
                return "\n".join(lines[next(starts) : end]) + body + "\n"
    return ""


def problem_in(value: Any, name: str) -> str | None:
    """The last message or turn with the function ``name``; None if none has it. ``value``: chat messages, a
    list of turns, or either as JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return value if _place(name, value) is not None else None
    texts = [text for message in value or () for text in _texts(message)]
    return next((text for text in reversed(texts) if _place(name, text) is not None), None)


def _texts(message: Any) -> list[str]:
    """Of a message, whose content may be a list of parts."""
    content = message.get("content", message.get("text")) if isinstance(message, dict) else message
    if isinstance(content, list):
        return [text for part in content for text in _texts(part)]
    return [content] if isinstance(content, str) else []


def _place(name: str, text: str) -> int | None:
    """Where the function begins that is defined at the beginning of a line."""
    match = re.search(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b", text, re.MULTILINE)
    return None if match is None else match.start()


def _is_code(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in docstrings
            return all(isinstance(part, PARTS) for part in ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
