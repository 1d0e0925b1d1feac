"""Numbers as text for people; unknown ones are a dash."""

from __future__ import annotations

NOTHING = "–"
UNITS_S = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def number(value: float | None, digits: int = 2) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}"


def count(value: float | None) -> str:
    return number(value, 0)


def speed(tokens_per_s: float | None) -> str:
    """A speed with at least three significant digits."""
    if tokens_per_s is None:
        return NOTHING
    return number(tokens_per_s, 0 if tokens_per_s >= 100 else 1 if tokens_per_s >= 10 else 2)


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.1%}"


def duration(seconds: float | None) -> str:
    """A time such as 2 h 05 min, 3 min 07 s, 7.70 s, 4.51 ms."""
    if seconds is None:
        return NOTHING
    if round(seconds) >= 3600:
        minutes = round(seconds / 60)
        return f"{minutes // 60:,} h {minutes % 60:02} min"
    if seconds >= 60:
        whole = round(seconds)
        return f"{whole // 60} min {whole % 60:02} s"
    unit_s, name = next((unit for unit in UNITS_S if seconds >= unit[0]), UNITS_S[0 if seconds == 0 else -1])
    value = seconds / unit_s
    return f"{value:.0f} {name}" if value >= 100 else f"{value:.3g} {name}"


def size(num_bytes: float) -> str:
    if num_bytes == 0:
        return NOTHING
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}" if num_bytes < 1000 else f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} GiB"
