"""JSON schemas in a form that llguidance keeps to the letter; what it would only seem to keep is refused.

It has a 29th of February in every year, a year 0 and a leap second in every minute, which parsers refuse:
patterns beside the formats take them out. Where a class of a pattern has all control characters it also
allows quotation marks and backslashes, so U+0000 is taken out; characters without an escape it leaves out.
"""

from __future__ import annotations

import re
from typing import Any

from specdist.sampling.constraints.numbers import check_numbers, check_values, with_exact_limits
from specdist.sampling.constraints.places import fault, rewritten, values_in

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
