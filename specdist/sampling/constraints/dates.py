"""Dates in JSON schemas. llguidance's ``date`` has a 29th of February in every year and a year 0, which no
calendar has and parsers refuse: a pattern beside the format takes them out."""

from __future__ import annotations

from typing import Any

YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
PATTERNS = {
    "date": f"^({YEAR}-{DAY}|{LEAP_YEAR}-02-29)$",
    "date-time": f"^({YEAR}-{DAY}|{LEAP_YEAR}-02-29)[Tt]",
}
# Keywords whose values are values, not schemas.
VALUES = ("const", "default", "enum", "examples")


def with_real_dates(schema: Any) -> Any:
    """The schema, whose dates exist."""
    if isinstance(schema, list):
        return [with_real_dates(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: value if name in VALUES else with_real_dates(value) for name, value in schema.items()}
    kind = schema.get("format")
    others = found.get("allOf", [])
    if isinstance(kind, str) and kind in PATTERNS and isinstance(others, list):
        found["allOf"] = [*others, {"pattern": PATTERNS[kind]}]
    return found
