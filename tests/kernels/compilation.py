"""Compiles the kernels ahead of time for several GPUs, of which none is needed.

    python -m tests.kernels.compilation            prints a table; the last line is JSON

With ``--known`` kernels that are the same as when an earlier output was written are not compiled again.
ptxas tells what a kernel takes of a multiprocessor: registers of each thread (255 at most), shared memory,
and the stack that it needs where registers are too few.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdist.kernels import layers, paged_attention, sampling

CAPABILITIES = (80, 90, 100)
DTYPE_POINTERS = {"bfloat16": "*bf16", "float16": "*fp16"}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Variant:
    """A kernel with what it is specialised on; ``pointers``: the types of the arguments that are not
    numbers."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    pointers: dict[str, str]
    floats: tuple[str, ...] = ()
    options: dict[str, Any] | None = None


@dataclass(frozen=True)
class Resources:
    """``key``: of what is compiled and of the compiler: with the same one the numbers are the same."""

    name: str
    capability: int
    key: str
    registers: int
    shared_bytes: int
    stack_bytes: int


def attention_variants(dtype: str) -> Iterator[Variant]:
    """Head widths 64 to 256; a local layer with a soft cap; groups of 8 heads, and single ones."""
    pointers = dict.fromkeys(("queries", "key_pages", "value_pages", "output"), DTYPE_POINTERS[dtype])
    pointers |= dict.fromkeys(("block_table", "used_keys", "query_starts"), "*i32")
    pointers |= dict.fromkeys(("split_outputs", "split_maxima", "split_sums"), "*fp32")
    for width, num_repeats, window, has_softcap in (
        (64, 4, 0, False),
        (96, 1, 0, False),
        (128, 8, 0, False),
        (128, 2, 4096, True),
        (256, 2, 4096, True),
    ):
        constants = {
            "num_heads": 8,
            "num_repeats": num_repeats,
            "width": width,
            "page_size": 16,
            "window": window,
            "has_softcap": has_softcap,
            "block_rows": paged_attention.block_rows_of(width, num_repeats),
            "block_keys": paged_attention.BLOCK_KEYS,
            "block_width": triton.next_power_of_2(width),
            "split_keys": paged_attention.SPLIT_KEYS,
        }
        options = paged_attention.options_of(width, constants["block_rows"])
        about = f"{dtype}, width {width}, {num_repeats} heads per group{', window, soft cap' * has_softcap}"
        kernels = [
            (f"attend, splits as programs ({about})", paged_attention.attend_kernel, {"in_splits": True}),
            (f"attend, one program ({about})", paged_attention.attend_kernel, {"in_splits": False}),
            (f"join ({about})", paged_attention.join_kernel, {}),
        ]
        for name, kernel, more in kernels:
            wanted = {key: value for key, value in (constants | more).items() if key in kernel.arg_names}
            yield Variant(name, kernel, wanted, pointers, ("scale", "softcap"), options)


def sampling_variants(dtype: str) -> Iterator[Variant]:
    """With both filters, and with neither."""
    pointers = {"logits": DTYPE_POINTERS[dtype], "probabilities": "*fp32", "uniforms": "*fp64"}
    pointers |= dict.fromkeys(("words", "drawn"), "*i64")
    floats = ("temperature", "top_p")
    kernels = [
        (f"process, {about} ({dtype})", sampling.process_kernel, {"has_top_k": filters, "has_top_p": filters})
        for about, filters in (("top-k and top-p", True), ("temperature alone", False))
    ]
    kernels += [
        ("draw", sampling.draw_kernel, {}),
        ("race", sampling.race_kernel, {"unit": 2.0**-sampling.UNIFORM_BITS}),
    ]
    for name, kernel, constants in kernels:
        wanted = {"block": sampling.BLOCK, **constants}
        yield Variant(name, kernel, wanted, pointers, floats, sampling.OPTIONS)


def layer_variants(dtype: str) -> Iterator[Variant]:
    """Norms of heads, of usual and of very wide rows; the other steps as in models of 1B to 70B."""
    pointer = DTYPE_POINTERS[dtype]
    norm = dict.fromkeys(("inputs", "weight", "output"), pointer)
    for width, weight_offset, rounds_first in (
        (128, 0.0, True),
        (2048, 0.0, True),
        (5120, 1.0, False),
        (8192, 0.0, True),
        (16384, 0.0, True),
        (layers.MAX_NORM_WIDTH, 0.0, True),
    ):
        constants = {"width": width, "weight_offset": weight_offset, "rounds_first": rounds_first}
        constants |= layers.norm_constants(width)
        about = f"norm of {width} ({dtype}{', as Gemma' if weight_offset else ''})"
        options = layers.norm_options(width)
        yield Variant(about, layers.rms_norm_kernel, constants, norm, ("epsilon",), options)
    residual = dict.fromkeys(("inputs", "residual", "weight_before", "weight", "sums", "output"), pointer)
    for width, is_gemma in ((2048, False), (4608, True), (8192, False), (layers.MAX_RESIDUAL_WIDTH, True)):
        constants = {"width": width, "weight_offset": float(is_gemma), "rounds_first": not is_gemma}
        constants |= {"is_normed_before": is_gemma, **layers.norm_constants(width)}
        about = f"residual and norm of {width} ({dtype}{', as Gemma' if is_gemma else ''})"
        options = layers.norm_options(width, layers.NUMBERS_WITH_RESIDUAL)
        yield Variant(about, layers.residual_norm_kernel, constants, residual, ("epsilon",), options)
    rotary = ("queries", "keys", "cos", "sin", "rotated_queries", "rotated_keys")
    for width in (64, 80, 128, 256):
        constants = {
            "width": width,
            "block_heads": layers.HEADS_PER_PROGRAM,
            "block_half": triton.next_power_of_2(width // 2),
        }
        about, kernel = f"rotary embedding of {width} ({dtype})", layers.rotary_kernel
        yield Variant(about, kernel, constants, dict.fromkeys(rotary, pointer), (), layers.OPTIONS)
    for is_tanh in (False, True):
        constants = {"width": 14336, "is_tanh": is_tanh, "block": layers.BLOCK}
        about = f"gated {'GELU' if is_tanh else 'SiLU'} ({dtype})"
        pointers = dict.fromkeys(("gates", "ups", "output"), pointer)
        yield Variant(about, layers.gate_kernel, constants, pointers, (), layers.OPTIONS)
    pointers = dict.fromkeys(("keys", "values", "key_pages", "value_pages"), pointer)
    pointers |= {"cache_index": "*i64"}
    for heads, width in ((8, 128), (1, 80)):
        constants = {"width": width, "token_width": heads * width}
        constants |= {"block": min(layers.BLOCK, triton.next_power_of_2(heads * width))}
        about = f"write {heads} heads of {width} ({dtype})"
        yield Variant(about, layers.write_kernel, constants, pointers, (), layers.OPTIONS)


def source_of(variant: Variant) -> ASTSource:
    names = variant.kernel.arg_names
    signature = {
        name: "constexpr" if name in variant.constants else "fp32" if name in variant.floats
        else variant.pointers.get(name, "i32")
        for name in names
    }  # fmt: skip
    # As at run time: memory of torch is aligned, and so are the strides of the cache.
    aligned = [name for name in names if signature[name][0] == "*" or name.startswith("stride_")]
    return ASTSource(
        variant.kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in variant.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )


def resources_of(variant: Variant, capability: int, known: dict[str, Resources]) -> Resources:
    """``known``: by their keys."""
    source, options = source_of(variant), variant.options or {}
    text = f"{triton.__version__} {source.hash()} {sorted(options.items())} {capability}"
    key = hashlib.sha256(text.encode()).hexdigest()
    if key in known:
        return replace(known[key], name=variant.name)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, local = map(int, found.groups())
    return Resources(variant.name, capability, key, registers, compiled.metadata.shared, stack + local)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.kernels.compilation", description="Compile the kernels."
    )
    parser.add_argument("--output", type=Path, help="also write the JSON document to this file")
    parser.add_argument("--known", type=Path, help="an earlier output")
    given = parser.parse_args()
    entries = json.loads(given.known.read_text(encoding="utf-8")) if given.known else []
    known = {entry["key"]: Resources(**entry) for entry in entries}
    found = [
        resources_of(variant, capability, known)
        for variants in (attention_variants, sampling_variants, layer_variants)
        for variant in variants("bfloat16")
        for capability in CAPABILITIES
    ]
    for resources in found:
        sys.stdout.write(
            f"{resources.name:75} sm_{resources.capability:<4} {resources.registers:3} registers, "
            f"{resources.shared_bytes / 1024:5.1f} KiB shared, {resources.stack_bytes} bytes of stack\n"
        )
    document = [asdict(resources) for resources in found]
    if given.output is not None:
        given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
