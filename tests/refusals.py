"""Which refusals (:class:`UserError`) of the package tests raise."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import specdist
from specdist.utils.errors import UserError

PACKAGE = Path(specdist.__file__).parent
Place = tuple[str, int]
"""A file below the package, and a line."""


def places(*modules: str) -> dict[Place, str]:
    """Where a :class:`UserError` is made in files and folders below the package, with the code."""
    found: dict[Place, str] = {}
    for module in modules:
        path = PACKAGE / module
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "UserError":
                    found[str(file.relative_to(PACKAGE)), node.lineno] = ast.unparse(node)
    return found


@contextlib.contextmanager
def recorded() -> Iterator[set[Place]]:
    """The places where refusals are made meanwhile, in this process."""
    made: set[Place] = set()
    former = UserError.__init__

    def recording(self: UserError, *args: Any) -> None:
        frame = sys._getframe(1)
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE):
            made.add((str(file.relative_to(PACKAGE)), frame.f_lineno))
        former(self, *args)

    UserError.__init__ = recording  # type: ignore[method-assign]
    try:
        yield made
    finally:
        UserError.__init__ = former  # type: ignore[method-assign]
