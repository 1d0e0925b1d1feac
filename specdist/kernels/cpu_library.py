"""The library of ``cpu_pass.c``, compiled for this processor where a C compiler is found.

It is kept in the user's cache folder, so that a machine compiles it once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

PASS_SOURCE = Path(__file__).with_name("cpu_pass.c")
HEADERS = [PASS_SOURCE.with_name(name) for name in ("cpu_products.h", "cpu_tiles.h")]
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-fopenmp")
COMPILE_SECONDS = 120
CPU_INFO = Path("/proc/cpuinfo")
# Lines of it that tell the instructions that the processor has.
INSTRUCTIONS = ("flags", "Features", "model name")

c_index = ctypes.c_int64
c_address = ctypes.c_void_p


class Product(ctypes.Structure):
    """A packed matrix: see the source, also for the others."""

    _fields_ = (("weight", c_address), ("bias", c_address), ("num_inputs", c_index), ("num_outputs", c_index))


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, Product) for name in ("qkv", "output", "gate_up", "down")),
        *(
            (name, c_address)
            for name in ("norm_before_attention", "norm_before_mlp", "query_norm", "key_norm")
        ),
        *((name, c_address) for name in ("keys", "values")),
        *((name, c_index) for name in ("window", "group")),
        ("scale", ctypes.c_float),
    )


class Model(ctypes.Structure):
    _fields_ = (
        *(
            (name, c_index)
            for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_width")
        ),
        *((name, c_index) for name in ("mlp_size", "page_size", "is_half", "num_threads")),
        *((name, ctypes.c_float) for name in ("epsilon", "head_epsilon")),
        *((name, c_address) for name in ("layers", "final_norm", "embeddings")),
        ("head", Product),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        *((name, c_index) for name in ("num_tokens", "num_logits", "table_width")),
        *((name, c_address) for name in ("token_ids", "slots", "positions", "logits_index")),
        *((name, c_address) for name in ("rotations", "page_table", "windowed_page_table")),
        *((name, c_address) for name in ("cosines", "sines", "hidden", "logits", "workspace")),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """A model's passes, with tiles where the system allows them. Raises :class:`OSError` or
    :class:`subprocess.SubprocessError` where it cannot be compiled."""
    loaded = _compiled(PASS_SOURCE)
    loaded.panel_width.restype = loaded.num_workspace_numbers.restype = c_index
    loaded.use_tiles.argtypes, loaded.use_tiles.restype = (c_index,), c_index
    loaded.use_tiles(True)
    loaded.pack_weight.argtypes = (c_address, c_index, c_index, c_index, c_address)
    loaded.pack_weight.restype = loaded.run_pass.restype = None
    return loaded


def _compiled(source: Path) -> ctypes.CDLL:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), *COMPILERS))), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler was found")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "specdist")
    parts = [*(each.read_text() for each in (source, *HEADERS)), *FLAGS, compiler, *processor()]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    path = folder / f"{source.stem.replace('_', '-')}-{digest}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            compiled = Path(unfinished, path.name)
            command = [compiler, *FLAGS, str(source), "-o", str(compiled), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)
            compiled.replace(path)
    return ctypes.CDLL(str(path))


def has_instruction(name: str) -> bool:
    """Whether the processor lists it."""
    return any(name in line.split() for line in processor())


def processor() -> list[str]:
    """The processor and its instructions: what ``-march=native`` means here."""
    found: dict[str, str] = {}
    if CPU_INFO.is_file():
        for line in CPU_INFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in INSTRUCTIONS:
                found.setdefault(name.strip(), value.strip())
    return [platform.machine(), *found.values()]
