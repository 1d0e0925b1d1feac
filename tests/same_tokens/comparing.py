"""The first place at which two runs' files differ."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.ipc

TOKENS = ("row_id", "sample_index", "completion_ids", "completion", "finish_reason")


def first_difference(there: Path, here: Path, *, of_tokens_alone: bool = False) -> str | None:
    """Of two run folders: None where every file of rows has the same bytes, or its rows the same tokens."""
    files = {
        folder: {path.name: path for path in (folder / "shards").rglob("*.arrow")} for folder in (there, here)
    }
    if not files[here] or files[there].keys() != files[here].keys():
        return f"files {sorted(files[here])}, there {sorted(files[there])}"
    for name, path in sorted(files[here].items()):
        if path.read_bytes() == files[there][name].read_bytes():
            continue
        one, other = (_rows(each, of_tokens_alone=of_tokens_alone) for each in (files[there][name], path))
        if len(one) != len(other):
            return f"{name}: {len(other)} rows, there {len(one)}"
        # By their texts: not a number is not itself.
        differing = [(a, b) for a, b in zip(one, other, strict=True) if repr(a) != repr(b)]
        if differing:
            changed = {key: (a.get(key), b.get(key)) for a, b in differing[:1] for key in a | b}
            words = [f"{key}: {b!r:.200}, there {a!r:.200}" for key, (a, b) in changed.items() if a != b]
            return f"{name}, row {differing[0][1].get('row_id')}: {'; '.join(words)}"
        if not of_tokens_alone:
            return f"{name}: other bytes of the same rows"
    return None


def _rows(path: Path, *, of_tokens_alone: bool) -> list[dict[str, object]]:
    table = pa.ipc.open_file(pa.BufferReader(path.read_bytes())).read_all()
    rows: list[dict[str, object]] = (table.select(TOKENS) if of_tokens_alone else table).to_pylist()
    return rows
