"""Ways in which a file is damaged: bytes as disks, copies and editors spoil them, and JSON as people do."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

Mutation = Callable[[random.Random, bytes], bytes]
HUGE_LENGTHS = (2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1)
DEPTH = 100_000
STRANGE_VALUES: tuple[Any, ...] = (
    None, True, "", "x", "\ud800", -1, 0, 1, 3, 2**31, 2**70, -(2**70), 0.5, 1e308, float("nan"),
    float("inf"), [], {}, [[]], {"": None}, ["x"], [1, "x"],
)  # fmt: skip


def flip_bits(rng: random.Random, content: bytes) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def truncate(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content))]


def zero_piece(rng: random.Random, content: bytes) -> bytes:
    start = rng.randrange(len(content))
    end = min(len(content), start + rng.choice([1, 4, 8, 64, 1024]))
    return content[:start] + bytes(end - start) + content[end:]


def huge_length(rng: random.Random, content: bytes) -> bytes:
    """An integer at a place where formats keep lengths and offsets."""
    width, layout = rng.choice([(4, "<I"), (8, "<Q")])
    if len(content) < width:
        return b"\xff" * width
    size = struct.pack(layout, rng.choice([length for length in HUGE_LENGTHS if length < 2 ** (8 * width)]))
    last = len(content) - width
    place = rng.choice([0, min(8, last), last, rng.randrange(last + 1) // width * width])
    return content[:place] + size + content[place + width :]


def empty(rng: random.Random, content: bytes) -> bytes:
    return b""


def noise(rng: random.Random, content: bytes) -> bytes:
    return rng.randbytes(max(1, len(content)))


BYTES: tuple[Mutation, ...] = (
    flip_bits, flip_bits, truncate, zero_piece, huge_length, huge_length, empty, noise,
)  # fmt: skip


def other_encoding(rng: random.Random, content: bytes) -> bytes:
    """As an editor on another system saves it."""
    text = content.decode("utf-8", "replace")
    return text.replace("e", "\xe9").encode(rng.choice(["utf-16", "utf-32", "latin-1"]), "replace")


def deep_nesting(rng: random.Random, content: bytes) -> bytes:
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    return opening * DEPTH + (b"0" + closing * DEPTH if rng.random() < 0.5 else b"")


def change_value(rng: random.Random, content: bytes) -> bytes:
    """One value of a JSON document, at any depth, becomes another one, often of another type."""

    def change(parent: Any, key: Any) -> None:
        parent[key] = rng.choice(STRANGE_VALUES)

    return _at_some_node(rng, content, change)


def remove_value(rng: random.Random, content: bytes) -> bytes:
    def remove(parent: Any, key: Any) -> None:
        del parent[key]

    return _at_some_node(rng, content, remove)


JSON: tuple[Mutation, ...] = (
    change_value, change_value, change_value, remove_value, remove_value, other_encoding, deep_nesting,
    flip_bits, truncate, zero_piece, empty, noise,
)  # fmt: skip


def change_line(rng: random.Random, content: bytes) -> bytes:
    """One line of a file of JSON lines."""
    lines = content.splitlines(keepends=True)
    index = rng.randrange(len(lines))
    lines[index] = rng.choice(JSON)(rng, lines[index].rstrip(b"\n")) + b"\n"
    return b"".join(lines)


JSONL: tuple[Mutation, ...] = (change_line, change_line, change_line, *BYTES)


def change_option(rng: random.Random, content: bytes) -> bytes:
    """One value of a flat YAML mapping."""
    lines = content.splitlines()
    index = rng.randrange(len(lines))
    value = rng.choice(
        ["", "-1", "1e400", "[1, 2]", "{a: b}", "!!python/object/apply:os.getcwd []", "*nobody", "'", "\t",
         "&a [*a]", ".nan", "0x1f", "2026-01-01", "yes", "\u00e9", "? x", "@", "%"]
    )  # fmt: skip
    lines[index] = lines[index].split(b":")[0] + b": " + value.encode()
    return b"\n".join(lines)


def alias_bomb(rng: random.Random, content: bytes) -> bytes:
    """A few hundred bytes that are billions of values when they are written out."""
    bomb = b"a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    for level in range(1, 12):
        name = b"*a%d" % (level - 1)
        bomb += b"a%d: &a%d [%s]\n" % (level, level, b", ".join([name] * 9))
    return content + bomb + b"seed: *a11\n"


YAML: tuple[Mutation, ...] = (
    change_option, change_option, change_option, alias_bomb, other_encoding, deep_nesting, *BYTES,
)  # fmt: skip


def change_header(rng: random.Random, content: bytes) -> bytes:
    """The JSON before a safetensors file, with its length put right."""
    size = int.from_bytes(content[:8], "little")
    mutate = rng.choice([change_value, change_value, remove_value, *BYTES])
    header = mutate(rng, content[8 : 8 + size])
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


SAFETENSORS: tuple[Mutation, ...] = (
    change_header, change_header, change_header, truncate, huge_length, empty, noise,
)  # fmt: skip


def _at_some_node(rng: random.Random, content: bytes, act: Callable[[Any, Any], None]) -> bytes:
    try:
        root = [json.loads(content)]
    except ValueError:
        return flip_bits(rng, content) if content else b"["
    nodes: list[tuple[Any, Any]] = []
    waiting: list[tuple[Any, Any]] = [(root, 0)]
    while waiting:
        parent, key = waiting.pop()
        nodes.append((parent, key))
        value = parent[key]
        keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        waiting += [(value, key) for key in keys]
    # Upper nodes matter more than the thousands below them, such as the tokens of a tokenizer.
    act(*rng.choice(nodes[:40] if rng.random() < 0.5 else nodes))
    return json.dumps(root[0] if root else None).encode("utf-8", "surrogatepass")
