"""The options of single rows, from columns of the input."""

from __future__ import annotations

import numbers
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specdist.config.generate import GenerateConfig
from specdist.config.groups import RULES, WHOLE_NUMBERS
from specdist.config.processing import DISTRIBUTION_OPTIONS, ROW_OPTIONS, STRUCT
from specdist.data.formats.prompts import Prompts
from specdist.data.run.manifest import ShardPlan
from specdist.sampling.processing.row_table import TokenOptions
from specdist.utils.errors import UserError


class RowOptionReader:
    """Reads them row by row; the run's are those of a row without a value."""

    def __init__(self, config: GenerateConfig, prompts: Prompts) -> None:
        """Raises :class:`UserError` for a column that is missing."""
        self._columns = list(config.row_options or [])
        self._defaults = {name: getattr(config, name) for name in DISTRIBUTION_OPTIONS}
        self._changes_distribution = config.may_vary(*DISTRIBUTION_OPTIONS)
        self._prompts = prompts
        self._num_samples, self._may_sample = config.num_samples, config.may_vary("num_samples")
        # Completions by row, where not all have the run's number.
        self.num_samples: Sequence[int] | None = None
        rule = config.constraint_of_all_rows
        self._rule = None if rule is None else f"--{rule[0]}"
        self._rule_column = config.constraint_column
        for name in self._columns:
            prompts.check_column("--row_options", name)

    def check(self) -> None:
        """All rows. Raises :class:`UserError` with the row and the column. Afterwards :attr:`num_samples` is
        known."""
        own_samples = array("l")
        columns = [self._prompts.values("--row_options", name) for name in self._columns]
        for row, values in enumerate(zip(*columns, strict=True)):
            own = self._checked(row, dict(zip(self._columns, values, strict=True)))
            if own.get("stop"):
                self._check_stops(row, own["stop"])
            own_samples.append(own.get("num_samples", self._num_samples))
        if self._may_sample and any(number != self._num_samples for number in own_samples):
            self.num_samples = own_samples

    def shards(self, rows_per_shard: int | None) -> ShardPlan:
        """The shards, with the numbers of completions."""
        shards = ShardPlan.of(self._prompts.num_rows, rows_per_shard, self._num_samples)
        if self.num_samples is None:
            return shards
        bounds = map(shards.bounds, range(shards.num_shards))
        sums = [sum(self.num_samples[first:end]) for first, end in bounds]
        return replace(shards, completions_per_shard=sums)

    def _check_stops(self, row: int, stops: list[str]) -> None:
        """Raises :class:`UserError` for stop strings of a row that has a constraint."""
        rule = self._rule
        if (
            self._rule_column is not None
            and self._prompts.rows.row(row, [self._rule_column])[self._rule_column] is not None
        ):
            rule = f"--constraint_column {self._rule_column}"
        if rule is not None:
            raise UserError(
                f"--row_options: row {row} has the stop string {stops[0]!r} and a constraint by {rule}, "
                "which exclude each other: a stop string could end a completion before it matches its "
                "constraint; leave the row's stop out: the constraint says where a completion ends"
            )

    def of(self, row: int) -> dict[str, Any]:
        """The options of a row, as the arguments of a :class:`specdist.engine.request.Request`."""
        if not self._columns:
            return {}
        own = self._checked(row, self._prompts.rows.row(row, self._columns))
        names = ("max_new_tokens", "seed", "stop_repeats")
        found: dict[str, Any] = {name: own[name] for name in names if name in own}
        if "stop" in own:
            found["stop"] = tuple(own["stop"])
        if self._changes_distribution:
            given = {name: own[name] for name in DISTRIBUTION_OPTIONS if name in own}
            found["options"] = TokenOptions(**self._defaults | given)
        return found

    def _checked(self, row: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values that are not null; those of the struct come first, columns of their own win."""
        struct = values.get(STRUCT) or {}
        if not isinstance(struct, Mapping):
            raise UserError(
                f"--row_options {STRUCT}: row {row} has {struct!r}, which must be an object of options"
            )
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
    rule = RULES[name]
    kind = numbers.Integral if name in WHOLE_NUMBERS else numbers.Real
    # A file may have every number as a float.
    if name in WHOLE_NUMBERS and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, kind) or not rule.holds(value):
        kinds = "a whole number" if name in WHOLE_NUMBERS else "a number"
        raise UserError(
            f"--row_options {place}: row {row} has {value!r}: it must be {kinds}, and {rule.text}"
        )
    return rule.kept(value)


def _stops(row: int, place: str, value: Any) -> list[str]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise UserError(
            f"--row_options {place}: row {row} has {value!r}, but it must be a text or a list of texts, none "
            "of them empty"
        )
    return found
