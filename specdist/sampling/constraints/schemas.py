"""JSON schemas in a form that llguidance keeps to the letter; what it would only seem to keep is refused.

It has a 29th of February in every year, a year 0 and a leap second in every minute, which parsers refuse:
patterns beside the formats take them out. Where a class of a pattern has all control characters it also
allows quotation marks and backslashes, so U+0000 is taken out; characters without an escape it leaves out.

Numbers llguidance keeps as float64, so that some would become others, silently: they are refused, or limits
are written in another form. What it reads and writes as it is: integers that are float64, and other numbers
of at most ``MAX_DIGITS`` digits, which it rounds once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
PATTERNS = {
    "date": f"^({YEAR}-{DAY}|{LEAP_YEAR}-02-29)$",
    "date-time": f"^({YEAR}-{DAY}|{LEAP_YEAR}-02-29)[Tt].{{6}}[0-5]",
    "time": "^.{6}[0-5]",
}
# The characters that no short escape writes, as in a class of a regular expression.
CONTROLS = r"\x00-\x07\x0b\x0e-\x1f\x7f"
IS_CONTROL = re.compile(f"[{CONTROLS}]")
NEGATED = re.compile(r"(?<!\\)((?:\\\\)*)\[\^((?:\\.|[^]\\])*)", re.DOTALL)
NAMES_CONTROL = re.compile(rf"[{CONTROLS}]|\\(v|p{{C|(x|u00)(0[0-7bBeEfF]|1|7[fF]))")
MAX_DIGITS, MAX_EXPONENT = 15, 22
# The integers of float64: int64, but for the least ones, which are no float64 or overflow.
SMALLEST, LARGEST = 1024 - 2**63, 2**63 - 1
MULTIPLE = re.compile(r'"multipleOf": ([-+.\w]+)')
# Keywords of JSON schema whose values are schemas by name.
_NAMED = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
# Keywords whose values are values, not schemas.
_VALUES = ("const", "default", "enum", "examples")


class ConstraintError(ValueError):
    """A constraint that cannot be used, with the reason for the one who wrote it."""


def fault(place: str, reason: str) -> ConstraintError:
    """The error of the part of a schema at this JSON pointer."""
    return ConstraintError(f"at {place or '/'}: {reason}")


def rewritten(schema: Any, mend: Callable[[dict[str, Any], str], Any], place: str = "") -> Any:
    """The schema, with what ``mend`` makes of each of its parts, given their JSON pointers, inner ones first.
    What is under unknown keywords is taken for schemas too: references may lead there."""
    if isinstance(schema, list):
        return [rewritten(inner, mend, f"{place}/{index}") for index, inner in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for keyword, value in schema.items():
        inside = f"{place}/{_escaped(keyword)}"
        if keyword in _NAMED and isinstance(value, dict):
            found[keyword] = {
                name: rewritten(inner, mend, f"{inside}/{_escaped(name)}") for name, inner in value.items()
            }
        elif keyword not in _VALUES:
            found[keyword] = rewritten(value, mend, inside)
    return mend(found, place)


def values_in(part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Numbers, texts and others in a part's ``const`` and ``enum``, at any depth, each with its keyword."""

    def leaves(value: Any) -> Iterator[Any]:
        if isinstance(value, (dict, list)):
            for inner in value.values() if isinstance(value, dict) else value:
                yield from leaves(inner)
        else:
            yield value

    for keyword in ("const", "enum"):
        yield from ((keyword, value) for value in leaves(part.get(keyword)))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def exact_float(text: str) -> float:
    """A number of JSON text, for ``json.loads``. Raises ValueError if float64 does not keep its digits."""
    if Decimal(text) != Decimal(repr(float(text))):
        raise ValueError(f"{text} has more digits than a float64 keeps: write fewer")
    return float(text)


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_kept(number: float, *, as_integer: bool) -> bool:
    """Whether llguidance keeps it. ``as_integer``: in 64 bits; else it is written like a float64."""
    if as_integer:
        return SMALLEST <= number < LARGEST and int(float(number)) == number
    _, digits, exponent = Decimal(repr(number)).normalize().as_tuple()
    is_short = len(digits) <= MAX_DIGITS and abs(int(exponent)) <= MAX_EXPONENT
    return is_short and (number != int(number) or int(float(number)) == Decimal(repr(number)))


def check_numbers(schema: Any) -> None:
    """Raises :class:`ConstraintError` for ``multipleOf`` of which llguidance cannot count joint multiples."""
    found = [Decimal(text).copy_abs() or Decimal(1) for text in MULTIPLE.findall(json.dumps(schema))]
    places = max((-int(number.as_tuple().exponent) for number in found), default=0)
    counts = [int(number * 10 ** max(places, 0)) for number in found]
    if len(counts) > 1 and math.lcm(*counts) * max(counts) >= 2**32:
        raise fault("", "its numbers of multipleOf have a common multiple beyond 2**32")


def check_values(part: dict[str, Any], place: str) -> None:
    """Raises :class:`ConstraintError` if a number in ``const`` or ``enum`` would become another one."""
    for keyword, value in values_in(part):
        if is_number(value) and not is_kept(value, as_integer=isinstance(value, int)):
            raise _not_kept(place, keyword, value)


def with_exact_limits(part: dict[str, Any], place: str) -> dict[str, Any]:
    """A part of a schema, with limits that llguidance keeps. Raises :class:`ConstraintError` for others.

    Limits beyond int64 are narrowed to ``SMALLEST`` and ``LARGEST``. An exclusive limit becomes the next
    number of ``MAX_DIGITS`` digits: llguidance may allow it, and adds 1 to integers in float64.
    """
    found, kinds = dict(part), part.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    is_integer = "integer" in kinds and "number" not in kinds
    multiple: Any = part.get("multipleOf")
    if is_number(multiple) and not is_kept(multiple, as_integer=False):
        raise _not_kept(place, "multipleOf", multiple)
    for name, sign in (("minimum", 1), ("maximum", -1)):
        exclusive = f"exclusive{name.capitalize()}"
        # Draft 4 has true and false beside the limit.
        keyword = name if part.get(exclusive) is True else exclusive
        limits = [(part[each], each) for each in (name, keyword) if is_number(part.get(each))]
        if not limits:
            continue
        found.pop(exclusive, None)
        bounds: list[float] = []
        for number, each in limits:
            is_open = each == exclusive or part.get(exclusive) is True
            if is_integer:
                whole = math.floor(sign * number) + 1 if is_open else math.ceil(sign * number)
                bounds.append(max(SMALLEST, whole) if sign > 0 else min(LARGEST, -whole))
                is_right = bounds[-1] == LARGEST or is_kept(bounds[-1], as_integer=True)
            else:
                bounds.append(_next_number(number, sign) if is_open else number)
                is_right = is_kept(number, as_integer=False) and is_kept(bounds[-1], as_integer=False)
            if not is_right:
                raise _not_kept(place, each, number)
        found[name] = max(bounds) if sign > 0 else min(bounds)
    return found


def _next_number(number: float, sign: int) -> float:
    given = Decimal(repr(number))
    digit = given.adjusted() + 1 - MAX_DIGITS if given else -MAX_EXPONENT
    return float(given + sign * Decimal(1).scaleb(digit))


def _not_kept(place: str, keyword: str, number: float) -> Exception:
    return fault(
        place,
        f"{keyword} {number} would become another number: llguidance keeps float64, so integers up to 2**53 "
        f"(beyond, a part of those of 64 bits) and {MAX_DIGITS} digits; write it as a string, or round it",
    )


def kept_schema(schema: Any) -> Any:
    """The schema for llguidance. Raises :class:`ConstraintError`, with the place, for what it cannot keep."""
    check_numbers(schema)
    return rewritten(schema, _mended)


def _mended(part: dict[str, Any], place: str) -> dict[str, Any]:
    check_values(part, place)
    for keyword, value in values_in(part):
        if isinstance(value, str) and IS_CONTROL.search(value):
            raise fault(place, f"{keyword} {value!r} has a control character, which no completion can have")
    if isinstance(properties := part.get("properties"), dict) and any("\0" in name for name in properties):
        raise fault(place, "properties has a name with U+0000, which no pattern is asked about")
    least, required = part.get("minProperties"), part.get("required", [])
    if isinstance(least, int) and isinstance(required, list) and least > len(required) + 1:
        raise fault(
            place,
            f"minProperties {least} needs {least - 1} names in required: llguidance lets names that are not "
            "in properties come twice",
        )
    found = with_exact_limits(part, place)
    if isinstance(pattern := part.get("pattern"), str):
        found["pattern"] = _kept_pattern(pattern, f"{place}/pattern")
    if isinstance(names := part.get("patternProperties"), dict):
        found["patternProperties"] = {
            _kept_pattern(name, f"{place}/patternProperties"): inner for name, inner in names.items()
        }
    kind, others = part.get("format"), part.get("allOf", [])
    if isinstance(kind, str) and kind in PATTERNS and isinstance(others, list):
        found["allOf"] = [*others, {"pattern": PATTERNS[kind]}]
    return found


def _kept_pattern(pattern: str, place: str) -> str:
    if NAMES_CONTROL.search(NEGATED.sub("", pattern)):
        raise fault(place, f"{pattern!r} asks for control characters, which no completion can have")
    return NEGATED.sub(r"\1[^\\x00\2", pattern)
