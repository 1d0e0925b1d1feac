"""Numbers in JSON schemas. llguidance keeps them as float64, so that some would become others, silently: they
are refused here, or limits are written in another form.

What it reads and writes as it is: integers that are float64, and other numbers of at most ``MAX_DIGITS``
digits, which it rounds once.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any

from specdist.sampling.constraints.places import fault, values_in

MAX_DIGITS, MAX_EXPONENT = 15, 22
# The integers of float64: int64, but for the least ones, which are no float64 or overflow.
SMALLEST, LARGEST = 1024 - 2**63, 2**63 - 1
MULTIPLE = re.compile(r'"multipleOf": ([-+.\w]+)')


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
