"""Text that every Python installation carries: the docstrings of its standard library.

Modules are parsed with :mod:`ast` and never imported.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from specdist.utils.errors import UserError

# Installed packages are not the standard library; the others hold tests, generated tables or boilerplate.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings"}
)
HELD_OUT_ONE_IN = 8
NUM_PROMPTS = 96
NUM_PROMPT_WORDS = (8, 72, 14, 110, 28, 10, 90, 18, 50, 36)
NUM_REFERENCE_WORDS = 36
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# The docstrings of one module, each under the name of its object.
Document = tuple[str, ...]


def load_documents(stdlib: Path | None = None) -> tuple[list[Document], list[Document]]:
    """Documents to train on, and held-out ones, one in eight by the hash of their content. Raises
    :class:`UserError` if there is no text."""
    stdlib = stdlib or Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[Document], list[Document]] = ([], [])
    for path in sorted(stdlib.rglob("*.py")):
        sections = _sections(path) if SKIPPED_FOLDERS.isdisjoint(path.relative_to(stdlib).parts) else ()
        if sections:
            digest = hashlib.sha256("".join(sections).encode()).digest()
            parts[digest[0] % HELD_OUT_ONE_IN == 0].append(sections)
    if not all(parts):
        raise UserError(
            f"the standard library folder {stdlib} contains no Python sources to read docstrings from: use a "
            "Python whose standard library is installed as .py files (not a zip or a minimal package)"
        )
    return parts


def cut_prompts(documents: Sequence[Document]) -> tuple[list[str], list[str]]:
    """Prompts of lengths that take turns, each from the beginning of a docstring on, and the texts that
    followed them: ``NUM_PROMPTS``, or all that there are, evenly from all documents."""
    found: list[tuple[str, str]] = []
    for document in documents:
        text, section_begin, used_until = "\n\n".join(document), 0, 0
        for section in document:
            num_words = NUM_PROMPT_WORDS[len(found) % len(NUM_PROMPT_WORDS)]
            words = re.compile(r"\S+").finditer(text, section_begin)
            ends = [word.end() for word in islice(words, num_words + NUM_REFERENCE_WORDS)]
            if section_begin >= used_until and len(ends) == num_words + NUM_REFERENCE_WORDS:
                end, used_until = ends[num_words - 1], ends[-1]
                found.append((text[section_begin:end], text[end:used_until]))
            section_begin += len(section) + len("\n\n")
    num = min(NUM_PROMPTS, len(found))
    chosen = [found[index * len(found) // num] for index in range(num)]
    return [prompt for prompt, _ in chosen], [reference for _, reference in chosen]


def _sections(path: Path) -> Document:
    """The docstrings of a module; none if it is in another Python's syntax, as some distributions have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sources of the library itself warn about their escape sequences
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return ()
    nodes = [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    texts = [(getattr(node, "name", ""), ast.get_docstring(node)) for node in nodes]
    return tuple(f"{name}:\n{text}" if name else text for name, text in texts if text)
