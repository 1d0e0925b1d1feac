"""A YAML file of options, each with its line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from specdist.utils.errors import UserError


class YamlOptions:
    """A YAML file of options. Every method raises as :meth:`value` does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))

    def options(self) -> dict[str, tuple[int, yaml.Node]]:
        """Values by option's name, each with its line, from 1. Raises :class:`UserError` if the file is not a
        mapping."""
        root = self._loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise UserError(f"--config {self.path} must be a mapping of option names to values")
        lines: dict[str, int] = {}
        for key, _ in root.value:
            line = key.start_mark.line + 1
            if key.value in lines:
                raise UserError(
                    f"--config {self.path}, line {line}: {key.value} is in line {lines[key.value]}, too: "
                    "leave one of them out"
                )
            lines[key.value] = line
        self._loader.flatten_mapping(root)
        return {str(key.value): (key.start_mark.line + 1, node) for key, node in root.value}

    def value(self, node: yaml.Node) -> Any:
        """What YAML makes of it. Raises ``yaml.YAMLError``, ValueError or RecursionError."""
        return self._loader.construct_object(node, deep=True)


@contextlib.contextmanager
def reading_yaml(path: Path) -> Iterator[YamlOptions]:
    try:
        yield YamlOptions(path)
    except UserError:
        raise
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"--config {path} cannot be read: {error}") from error


def says(text: str, value: float) -> bool:
    """Whether a number is what people read in its text: not the octal, nor the number to base 60, of YAML."""
    if text.lstrip("+-").lower().startswith(("0x", "0b", ".inf", ".nan")):
        return True
    try:
        return float(text) == value
    except ValueError:
        return False
