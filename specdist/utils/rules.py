"""What an option's value must be, and which options do not go together: declared beside the options."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from specdist.utils.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RULE = "rule"  # in the metadata of a field
BOUNDS = ("at_least", "above", "at_most", "below", "note")


@dataclass(frozen=True)
class Rule:
    """What holds for a value, or for every item of a list.

    ``text``: what a message says after the option and its value; ``other``: a value that means another, in
    whose place that one is kept.
    """

    holds: Callable[[Any], bool]
    text: str
    other: tuple[Any, Any] | None = None

    def kept(self, value: Any) -> Any:
        """A value that is in order, as it is kept."""
        return self.other[1] if self.other is not None and value == self.other[0] else value

    def check(self, name: str, value: Any) -> None:
        """Raises :class:`UserError`. None, of an option that was not given, is in order."""
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if item is not None and not self.holds(item):
                raise UserError(f"--{name} {item!r} {self.text}")


def within(
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    note: str | None = None,
    text: str | None = None,
) -> Rule:
    """A range of numbers. ``note``: what a bound means, for messages; ``text``: all that they say."""

    def holds(value: float) -> bool:
        return (
            (at_least is None or value >= at_least)
            and (above is None or value > above)
            and (at_most is None or value <= at_most)
            and (below is None or value < below)
        )

    low, high = at_least if above is None else above, at_most if below is None else below
    if high is not None:
        range_ = f"in {'[' if above is None else '('}{low}, {high}{']' if below is None else ')'}"
        said = f"be between {low} and {high}" if None not in (above, below) else f"be {range_}"
    elif low == 0:
        said = "not be negative" if above is None else "be positive"
    else:
        said = f"be at least {low}" if above is None else f"be above {low}"
    return Rule(holds, text or f"must {said}" + (f"; {note}" if note else ""))


SEED = Rule(lambda value: 0 <= value < 2**63, "must be in [0, 2**63)")
# Options, with spaces between them, that are refused where they are given and a function of all options is
# true; and what goes on after the option and its value, ending with the remedy: ``{o.name}`` is the value
# of another option. A class of options has them in its table ``_refusals``.
Refusal = tuple[str, Callable[[Any], object], str]
Refusals = tuple[Refusal, ...]


def written(name: str, value: Any) -> str:
    """An option as it is given on the command line."""
    values = value if isinstance(value, (list, tuple)) else [] if value is True else [value]
    return " ".join([f"--{name}", *(shlex.quote(str(item)) for item in values)])


def check_ranges(options: DataclassInstance) -> None:
    """Raises :class:`UserError` for a value that is out of its range; others are as they are kept."""
    for item in fields(options):
        if (rule := item.metadata.get(RULE)) is not None:
            rule.check(item.name, getattr(options, item.name))
            if rule.other is not None:
                setattr(options, item.name, rule.kept(getattr(options, item.name)))


def check_refusals(options: DataclassInstance) -> None:
    """Raises :class:`UserError` for an option that is given beside others that exclude it."""
    defaults = {item.name: item.default for item in fields(options)}
    for owner in type(options).__mro__:
        for names, holds, why in vars(owner).get("_refusals", ()):
            for name in names.split():
                value = getattr(options, name)
                if _is_given(value, defaults[name]) and holds(options):
                    raise UserError(f"{written(name, value)} {why.format(o=options)}")


def _is_given(value: Any, default: Any) -> bool:
    return value is not None and value is not False and value != [] and value != default


def check_options(options: DataclassInstance) -> None:
    """Check ranges, and the combinations that are refused. Raises :class:`UserError`."""
    check_ranges(options)
    check_refusals(options)
