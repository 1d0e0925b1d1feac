"""Reads a folder as TensorBoard does: records of length, checksum, event and checksum."""

from __future__ import annotations

import struct
from pathlib import Path


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by tag, in the order in which they were written."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content, place = path.read_bytes(), 0
        while place < len(content):
            (length,) = struct.unpack_from("<Q", content, place)
            event = Event.FromString(content[place + 12 : place + 12 + length])
            place += length + 16
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found
