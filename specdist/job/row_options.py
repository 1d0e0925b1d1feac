"""The options of single rows, from columns of the input."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

from specdist.config.generate import GenerateConfig
from specdist.config.processing import DISTRIBUTION_OPTIONS, ROW_OPTIONS, RULES, STRUCT, WHOLE_NUMBERS
from specdist.data import Prompts
from specdist.data.rows import LOGPROB_COLUMNS
from specdist.sampling.options import TokenOptions
from specdist.utils.errors import UserError


class RowOptionReader:
    """Reads them row by row; the run's are those of a row without a value."""

    def __init__(self, config: GenerateConfig, prompts: Prompts) -> None:
        """Raises :class:`UserError` for a column that is missing."""
        self._columns = list(config.row_options or [])
        self._defaults = {name: getattr(config, name) for name in DISTRIBUTION_OPTIONS}
        self._changes_distribution = config.may_vary(*DISTRIBUTION_OPTIONS)
        self._prompts = prompts
        for name in self._columns:
            prompts.check_column("--row_options", name)

    def check(self) -> None:
        """All rows. Raises :class:`UserError` with the row and the column."""
        columns = [self._prompts.rows.values(name) for name in self._columns]
        for row, values in enumerate(zip(*columns, strict=True)):
            self._checked(row, dict(zip(self._columns, values, strict=True)))

    def of(self, row: int) -> dict[str, Any]:
        """Of a row, as the arguments of a :class:`specdist.engine.request.Request`."""
        if not self._columns:
            return {}
        values = self._prompts.rows.read(row, row + 1, self._columns).to_pylist()[0]
        own = self._checked(row, values)
        found: dict[str, Any] = {name: own[name] for name in ("max_new_tokens", "seed") if name in own}
        if "stop" in own:
            found["stop"] = tuple(own["stop"])
        if self._changes_distribution:
            given = {name: own[name] for name in DISTRIBUTION_OPTIONS if name in own}
            found["options"] = TokenOptions(**self._defaults | given)
        return found

    def _checked(self, row: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values that are not null; those of the struct come first, columns of their own win."""
        struct = values.get(STRUCT) or {}
        given = {
            **struct,
            **{name: value for name, value in values.items() if name != STRUCT and value is not None},
        }
        found: dict[str, Any] = {}
        for name, value in given.items():
            place = name if values.get(name) is not None else f"{STRUCT}.{name}"
            if name not in ROW_OPTIONS:
                raise UserError(
                    f"--row_options {place}: {name} is not an option that a row can have; use "
                    f"{', '.join(ROW_OPTIONS)}"
                )
            if value is not None:
                found[name] = (
                    _stops(row, place, value) if name == "stop" else _number(row, place, name, value)
                )
        return found


def _number(row: int, place: str, name: str, value: Any) -> Any:
    holds, rule = RULES[name]
    kind = numbers.Integral if name in WHOLE_NUMBERS else numbers.Real
    # A file may have every number as a float.
    if name in WHOLE_NUMBERS and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, kind) or not holds(value):
        kinds = "a whole number" if name in WHOLE_NUMBERS else "a number"
        raise UserError(f"--row_options {place}: row {row} has {value!r}, which must be {kinds} and {rule}")
    return value


def _stops(row: int, place: str, value: Any) -> list[str]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise UserError(
            f"--row_options {place}: row {row} has {value!r}, but it must be a text or a list of texts, none "
            "of them empty"
        )
    return found


def check_logprob_columns(config: GenerateConfig, prompts: Prompts) -> None:
    """Raises :class:`UserError` for columns of the input that have the names of those of ``--logprobs``."""
    taken = [name for name in prompts.schema.names if name in LOGPROB_COLUMNS]
    if config.logprobs is not None and taken:
        raise UserError(
            f"--prompts {prompts.files[0]} has columns with names that --logprobs writes: "
            f"{', '.join(taken)}; rename them"
        )
