"""Sizes of memory as people write them."""

from __future__ import annotations

import re

from specdist.utils.errors import UserError

BYTES_PER_UNIT = {
    "": 1,
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


def bytes_of(option: str, size: str) -> int:
    """The bytes of a size like ``8GiB``, which this option gives. Raises :class:`UserError`."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", size)
    if not match or match[2].upper() not in BYTES_PER_UNIT:
        raise UserError(f"--{option} {size!r} is not a size: write it like 8GiB")
    return int(float(match[1]) * BYTES_PER_UNIT[match[2].upper()])
