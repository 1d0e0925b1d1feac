"""Compiles the kernels ahead of time for several GPUs, of which none is needed.

    python -m tests.kernels.compilation            prints a table; the last line is JSON

With ``--known`` kernels that are the same as when an earlier output was written are not compiled again.
ptxas tells what a kernel takes of a multiprocessor: registers of each thread (255 at most), shared memory,
and the stack that it needs where registers are too few. Its machine code tells what a step of a loop takes.
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

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdist.kernels import (
    experts,
    filters,
    layers,
    paged_attention,
    products,
    recurrent,
    rotary,
    rounding,
    sampling,
    shared_rows,
)

CAPABILITIES = (80, 90, 100)
# float32 is for tests: on one GPU it is known to fit.
DTYPES = {"bfloat16": CAPABILITIES, "float32": (90,)}
DTYPE_POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
MACHINE_CODE = r"/\*([0-9a-f]{4,})\*/\s+(.*?);"
# What a cache in 8 bits is read as, and by which GPUs; heads that read it.
FLOAT8_PAGES = {"bits of float8": ("*u8", (80,)), "float8": ("*fp8e4nv", (90, 100))}
FLOAT8_SHAPES = tuple(
    (*shape, name)
    for shape in ((64, 0, 4, 1, 0), (128, 0, 8, 1, 0), (128, 0, 8, 4, 0), (128, 0, 8, 512, 0),
                  (256, 0, 2, 512, 4096), (512, 64, 128, 1, 0))
    for name in FLOAT8_PAGES
)  # fmt: skip
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
    capabilities: tuple[int, ...] = CAPABILITIES


@dataclass(frozen=True)
class Resources:
    """``key``: of what is compiled and of the compiler: with the same one the numbers are the same. Of the
    loops that have no other inside: ``loop_instructions`` of the longest, ``loop_barriers`` of the one with
    most. ``instructions``: of all, None of what was compiled before they were counted."""

    name: str
    capability: int
    key: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    loop_instructions: int
    loop_barriers: int
    instructions: int | None = None


def attention_variants(dtype: str) -> Iterator[Variant]:
    """Head widths 64 to 256; local layers with a soft cap, and with sinks; groups of 8 heads, and single
    ones; tiles for decoding, verification and prompts; caches in 8 bits, whose numbers a GPU reads if it has
    instructions for them, and else their bits."""
    of_numbers = ("queries", "key_pages", "value_pages", "sinks", "output")
    pointers = dict.fromkeys(of_numbers, DTYPE_POINTERS[dtype])
    pointers |= dict.fromkeys(("key_scales", "value_scales"), "*bf16")
    pointers |= dict.fromkeys(("block_table", "used_keys", "query_starts"), "*i32")
    pointers |= dict.fromkeys(("split_outputs", "split_maxima", "split_sums"), "*fp32")
    for width, rest, num_repeats, num_queries, window, more in (
        (64, 0, 4, 1, 0, ""),
        (64, 0, 4, 512, 0, ""),
        (64, 0, 8, 1, 128, "sinks"),
        (64, 0, 8, 512, 128, "sinks"),
        (96, 0, 1, 512, 0, ""),
        (128, 0, 8, 1, 0, ""),
        (128, 0, 8, 4, 0, ""),
        (128, 0, 8, 512, 0, ""),
        # Drafters of the target's states.
        (128, 0, 4, 1, 0, "first hidden"),
        (128, 0, 4, 16, 0, "no mask"),
        (128, 0, 2, 1, 4096, "soft cap"),
        (128, 0, 2, 512, 4096, "soft cap"),
        (256, 0, 2, 512, 4096, "soft cap"),
        # DeepSeek's keys and values of every head, and its latents.
        (128, 64, 1, 512, 0, ""),
        (512, 64, 128, 1, 0, ""),
        (512, 64, 128, 512, 0, ""),
        *FLOAT8_SHAPES * (dtype != "float32"),
    ):
        num_repeats, num_parts = paged_attention.heads_of_program(width, num_repeats)
        is_latent = num_parts > 1
        tile = paged_attention.Tile.of(width, num_repeats, getattr(torch, dtype), num_queries, rest)
        constants = {
            "num_heads": 8 * num_parts,
            "num_repeats": num_repeats,
            "num_parts": num_parts,
            "width": width,
            "rest_width": rest,
            "is_latent": is_latent,
            "page_size": 16,
            "window": window,
            "is_causal": more != "no mask",
            "hides_first": more == "first hidden",
            "has_softcap": more == "soft cap",
            "block_rows": tile.num_rows,
            "block_keys": tile.num_keys,
            "block_width": triton.next_power_of_2(width),
            "block_rest": triton.next_power_of_2(max(1, rest)),
            "split_keys": paged_attention.SPLIT_KEYS,
        }
        about = f"{dtype}, width {width}" + f" + {rest}" * (rest > 0) + ", latent" * is_latent
        about += f", {num_repeats} heads per group, {tile.num_rows} rows"
        about += ", window" * bool(window) + f", {more.removeprefix('bits of ')}" * bool(more)
        if more != "sinks":
            constants["sinks"] = None
        own, capabilities = FLOAT8_PAGES.get(more, ("", CAPABILITIES))
        own_pointers = pointers | dict.fromkeys(("key_pages", "value_pages"), own) if own else pointers
        if not own:
            constants |= {"key_scales": None, "value_scales": None}
        kernels = [
            (f"attend, splits as programs ({about})", paged_attention.attend_kernel, {"in_splits": True}),
            (f"attend, one program ({about})", paged_attention.attend_kernel, {"in_splits": False}),
            (f"join ({about})", paged_attention.join_kernel, {}),
        ]
        for name, kernel, more_constants in kernels:
            wanted = {
                key: value for key, value in (constants | more_constants).items() if key in kernel.arg_names
            }
            if kernel is paged_attention.attend_kernel or not own:
                floats = ("scale", "softcap")
                yield Variant(name, kernel, wanted, own_pointers, floats, tile.options, capabilities)


def sampling_variants(dtype: str) -> Iterator[Variant]:
    """Of 128,256 ids; with both filters, with one, and with none."""
    pointer = DTYPE_POINTERS[dtype]
    pointers = {"logits": pointer, "listed": pointer, "probabilities": "*fp32", "notes": "*fp32"}
    pointers |= dict.fromkeys(("uniforms", "sums", "speeds"), "*fp64")
    pointers |= {"words": "*i64", "drawn": "*i64", "winners": "*i32"}
    shared = filters.constants(128_256, getattr(torch, dtype)) | {"unit": 2.0**-sampling.UNIFORM_BITS}

    def variant(name: str, kernel: Any, **constants: bool) -> Variant:
        wanted = {key: value for key, value in (shared | constants).items() if key in kernel.arg_names}
        return Variant(name, kernel, wanted, pointers, ("temperature", "top_p"), filters.OPTIONS)

    yield variant(f"survey ({dtype})", filters.survey_kernel)
    for about, has_top_k, has_top_p in (("top-k and top-p", True, True), ("top-p", False, True)):
        used = {"has_top_k": has_top_k, "has_top_p": has_top_p}
        yield variant(f"weigh, {about} ({dtype})", filters.weigh_kernel, **used)
        yield variant(f"list, {about} ({dtype})", filters.list_kernel, **used)
        yield variant(f"search, {about} ({dtype})", filters.search_kernel, **used)
    yield variant(f"normalize, filtered ({dtype})", filters.normalize_kernel, is_filtered=True)
    yield variant(f"normalize, temperature alone ({dtype})", filters.normalize_kernel, is_filtered=False)
    if dtype != "float32":
        yield variant("mass", sampling.mass_kernel)
        yield variant("draw", sampling.draw_kernel)
        yield variant("race", sampling.race_kernel)
        yield variant("winner", sampling.winner_kernel)


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
    residual |= {"peers": "*i64", "turns": "*i64"}
    for width, is_gemma, num_ranks in (
        (2048, False, 1), (4608, True, 1), (8192, False, 1), (layers.MAX_RESIDUAL_WIDTH, True, 1),
        (4608, True, 2), (8192, False, 4), (8192, False, 8),
    ):  # fmt: skip
        constants = {"width": width, "weight_offset": float(is_gemma), "rounds_first": not is_gemma}
        constants |= {"is_normed_before": is_gemma, **layers.norm_constants(width)}
        constants |= {"num_ranks": num_ranks, "block_ranks": num_ranks, "half": 64 * width}
        constants |= {"peers": None, "turns": None} if num_ranks == 1 else {}
        of = f" of sums over {num_ranks}" * (num_ranks > 1)
        about = f"residual and norm{of} of {width} ({dtype}{', as Gemma' if is_gemma else ''})"
        options = layers.norm_options(width, layers.NUMBERS_WITH_RESIDUAL)
        own = constants | {"block": None}
        yield Variant(about, layers.residual_norm_kernel, own, residual, ("epsilon",), options)
        if num_ranks > 1:
            constants = constants | {"half": 512 * width}
            about, kernel = f"{about}, rows shared out", shared_rows.shared_rows_kernel
            yield Variant(about, kernel, constants, residual, ("epsilon",), options)
    for is_tanh in (False, True):
        constants = {"width": 14336, "is_tanh": is_tanh, "block": layers.BLOCK}
        about = f"gated {'GELU' if is_tanh else 'SiLU'} ({dtype})"
        pointers = dict.fromkeys(("gates", "ups", "output"), pointer)
        yield Variant(about, layers.gate_kernel, constants, pointers, (), layers.OPTIONS)
    of_rotation = ("queries", "cos", "sin", "rotated_queries", "rotated_keys")
    of_heads = (*of_rotation, "keys", "values", "key_pages", "value_pages")
    pointers = dict.fromkeys(of_heads, pointer) | {"cache_index": "*i64"}
    pointers |= dict.fromkeys(("key_scales", "value_scales"), "*bf16")
    for width, rotates, writes, is_float8 in (
        (64, True, True, False), (80, True, False, False), (128, True, True, False), (128, True, True, True),
        (128, False, True, False), (256, True, True, True), (80, False, True, True),
    ):  # fmt: skip
        constants = {"width": width, "rotates": rotates, "writes": writes, "is_float8": is_float8}
        constants |= {"block_heads": rotary.HEADS_PER_PROGRAM}
        constants |= {"block_half": triton.next_power_of_2(width // 2)}
        constants |= {} if rotates else dict.fromkeys(of_rotation)
        constants |= {} if is_float8 else dict.fromkeys(("key_scales", "value_scales"))
        if not writes:
            constants |= dict.fromkeys(("values", "cache_index", "key_pages", "value_pages"))
        own = pointers | dict.fromkeys(("key_pages", "value_pages"), "*u8") if is_float8 else pointers
        about = " and ".join(["rotary embedding"] * rotates + ["write"] * writes)
        about += f" of {width}{' as float8' * is_float8} ({dtype})"
        yield Variant(about, rotary.heads_kernel, constants, own, (), layers.OPTIONS)


def rounding_variants(dtype: str) -> Iterator[Variant]:
    """Of inputs of 70B models over four ranks, and whole; to int8, too."""
    pointers = {"inputs": DTYPE_POINTERS[dtype], "narrow": "*u8", "scales": "*fp32"}
    for width, is_float8, has_scale in (
        (2048, True, False), (2048, False, False), (8192, True, False), (8192, True, True),
        (28672, True, False),
    ):  # fmt: skip
        constants = {"width": width, "is_float8": is_float8, "has_scale": has_scale}
        constants |= layers.norm_constants(width)
        about = f"rounding of {width} to {'float8' if is_float8 else 'int8'} ({dtype})"
        about = about.replace(" (", ", a stored scale (") if has_scale else about
        options, numbers = layers.norm_options(width), ("limit", "scale")
        yield Variant(about, rounding.round_kernel, constants, pointers, numbers, options)


def expert_variants(dtype: str) -> Iterator[Variant]:
    """The first products of gpt-oss's experts, of DeepSeek's, and of INT4 in groups, for few and many tokens
    of each."""
    pointers = {"inputs": DTYPE_POINTERS[dtype], "output": DTYPE_POINTERS[dtype], "numbers": "*u8"}
    pointers |= {"scales": "*fp32", "zeros": "*i8", "ends": "*i32"}
    for about, kind, rows, columns, num_outputs, num_inputs in (
        ("MXFP4", "float4", 1, 32, 5760, 2880),
        ("FP8 in blocks", "float8", 128, 128, 4096, 7168),
        ("INT4 in groups", "int4", 1, 128, 1536, 2048),
    ):
        few, many = experts.FEW_TOKENS, experts.MANY_TOKENS
        for num_tokens in (few,) if dtype == "float32" else (few, many):
            constants = {
                "kind": kind,
                "rows": rows,
                "columns": columns,
                "has_powers": kind == "float4",
                "num_experts": 128,
                "num_outputs": num_outputs,
                "num_inputs": num_inputs,
                "block_experts": 128,
                "block_tokens": num_tokens,
                "block_outputs": experts.BLOCK_OUTPUTS,
                "block_inputs": experts.BLOCK_INPUTS,
            }
            own = pointers | {"scales": "*u8"} if kind == "float4" else pointers
            if kind != "int4":
                constants["zeros"] = None
            name = f"experts, {about}, blocks of {num_tokens} tokens ({dtype})"
            yield Variant(name, experts.grouped_product_kernel, constants, own, (), experts.OPTIONS)
    # Of Qwen3's mixtures and DeepSeek V3.
    for num_experts, num_groups, num_kept, is_sigmoid in ((128, 1, 1, False), (256, 8, 4, True)):
        constants = {
            "is_sigmoid": is_sigmoid, "num_experts": num_experts, "num_chosen": 8, "num_groups": num_groups,
            "num_kept": num_kept, "block_groups": num_groups, "block_size": num_experts // num_groups,
            "block_chosen": 8, **({} if is_sigmoid else {"correction": None}),
        }  # fmt: skip
        pointers = {"logits": DTYPE_POINTERS[dtype], "correction": "*fp32", "chosen": "*i64"}
        pointers["weights"] = DTYPE_POINTERS[dtype]
        name = f"router, {num_experts} experts{' in groups' * is_sigmoid} ({dtype})"
        options = {"num_warps": 1, "enable_fp_fusion": False}
        yield Variant(name, experts.route_kernel, constants, pointers, ("share", "rest"), options)
    # Of gpt-oss, with biases.
    pointers = dict.fromkeys(("hidden", "rows", "weights", "biases", "output"), DTYPE_POINTERS[dtype])
    pointers |= dict.fromkeys(("ids", "places", "sorted_ids"), "*i64") | {"ends": "*i32"}
    shared = {"num_experts": 128, "num_chosen": 4, "width": 2880, "block_width": experts.BLOCK_WIDTH}
    blocks = {"block_pairs": experts.BLOCK_PAIRS, "block_others": experts.BLOCK_OTHERS}
    yield Variant(f"sorting by experts ({dtype})", experts.sort_kernel, shared | blocks, pointers)
    options = {"enable_fp_fusion": False}
    yield Variant(f"sum over experts ({dtype})", experts.sum_kernel, shared, pointers, (), options)


def product_variants(dtype: str) -> Iterator[Variant]:
    """Of few tokens and of more, with weights as they are and in 8 bits, whose scales are of rows or blocks,
    and inputs that are rounded or not; and how many bytes of weights of a program are on their way."""
    pointers = {"scales": "*fp32", "input_scales": "*fp32", "partials": "*fp32", "arrivals": "*i32"}
    of_norms = ("residual", "weight_before", "weight")
    pointers |= dict.fromkeys(("inputs", "numbers", "bias", "output", *of_norms), DTYPE_POINTERS[dtype])
    narrow = [(name, *FLOAT8_PAGES[name], columns) for name in FLOAT8_PAGES for columns in (0, 128)]
    narrow += [("int8", "*i8", CAPABILITIES, 0), ("weights in int8", "*i8", CAPABILITIES, 0)]
    for about, own, capabilities, columns in (("", "", CAPABILITIES, 0), *narrow * (dtype != "float32")):
        itemsize = 1 if own else getattr(torch, dtype).itemsize
        stages = products.STAGES[itemsize]
        kib = (stages - 1) * products.BLOCK_OUTPUTS * products.BLOCK_INPUTS * itemsize // 1024
        names = ("numbers",) if about.startswith("weights") else ("numbers", "inputs")
        constants = {"bias": None, "rows": columns or int(bool(own)), "columns": columns}
        constants |= {} if own else dict.fromkeys(("scales", "input_scales"))
        constants |= {"input_scales": None} if len(names) == 1 else {}
        constants |= {"weight_offset": 0.0, "rounds_first": True}
        own_pointers = pointers | (dict.fromkeys(names, own) if own else {})
        about += ", " * bool(about) + "scales of blocks, " * bool(columns)
        about += f"{stages} stages, {kib} KiB on their way ({dtype})"
        sizes = [(1, 0, 0), (1, 1, 0), (products.MAX_TOKENS, 0, 0), (1, 0, 4096), (1, 0, 8192)]
        for num_tokens, gate, width in sizes[:1] if dtype == "float32" else sizes[: 3 if own else 5]:
            # The wider rows are normed before, too.
            absent = dict.fromkeys({0: of_norms, 4096: of_norms[1:2], 8192: ()}[width])
            then = f"norm of {width}, " * bool(width) + "SiLU, " * gate
            yield Variant(
                f"product of {num_tokens} tokens, {then}{about.removeprefix('bits of ')}",
                products.few_tokens_kernel,
                constants | absent | {"gate": gate, **products.constants(num_tokens, width)}, own_pointers,
                ("epsilon",), {"num_stages": stages}, capabilities,
            )  # fmt: skip


def recurrent_variants(dtype: str) -> Iterator[Variant]:
    """States as in Falcon-Mamba 7B; Zamba 2, Nemotron-H and Falcon-H1; Qwen3-Next, OLMo-Hybrid and Kimi."""
    pointers = dict.fromkeys(("x", "b", "c"), DTYPE_POINTERS[dtype])
    of_tokens = ("queries", "keys", "values", "log_decays")
    pointers |= dict.fromkeys((*of_tokens, "states", "steps", "rates", "output"), "*fp32")
    pointers["runs"] = "*i64"
    for width, state_size, version in ((8192, 16, 1), (64, 64, 2), (64, 128, 2), (64, 256, 2)):
        constants = {"width": width, "state_size": state_size, "has_rate_of_number": version == 1}
        constants |= recurrent.mamba_constants(width, state_size)
        about = f"Mamba {version}, heads of {width}, states of {state_size} ({dtype})"
        yield Variant(about, recurrent.mamba_kernel, constants, pointers, (), recurrent.OPTIONS)
    for key_width, value_width, is_fine in ((128, 128, False), (96, 192, False), (128, 128, True)):
        constants = {"key_width": key_width, "value_width": value_width, "has_decay_of_number": is_fine}
        constants |= recurrent.delta_rule_constants(key_width, value_width)
        about = f"delta rule, {key_width} × {value_width}{', fine decays' * is_fine} ({dtype})"
        yield Variant(about, recurrent.delta_rule_kernel, constants, pointers, (), recurrent.OPTIONS)


VARIANTS = (
    attention_variants, sampling_variants, layer_variants, rounding_variants, expert_variants,
    product_variants, recurrent_variants,
)  # fmt: skip


def source_of(variant: Variant) -> ASTSource:
    names = variant.kernel.arg_names
    signature = {
        name: "constexpr" if name in variant.constants else "fp32" if name in variant.floats
        else variant.pointers.get(name, "i32")
        for name in names
    }  # fmt: skip
    # As at run time: memory of torch is aligned, and so are the strides of the cache and widths of products.
    aligned = [
        parameter.name for parameter in variant.kernel.params
        if (signature[parameter.name][0] == "*" or parameter.name.startswith(("stride_", "num_inputs")))
        and signature[parameter.name] != "constexpr" and not parameter.do_not_specialize
    ]  # fmt: skip
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
        usage, code = (
            subprocess.run([CUOBJDUMP, what, file.name], capture_output=True, text=True, check=True).stdout
            for what in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, local = map(int, found.groups())
    shared, loops, size = compiled.metadata.shared, loops_of(code), len(re.findall(MACHINE_CODE, code))
    longest, most = (max(counts, default=0) for counts in zip(*loops, strict=True)) if loops else (0, 0)
    return Resources(variant.name, capability, key, registers, shared, stack + local, longest, most, size)


def loops_of(code: str) -> list[tuple[int, int]]:
    """Of each innermost loop of machine code as cuobjdump prints it: instructions and barriers."""
    lines = re.findall(MACHINE_CODE, code)
    places = {int(address, 16): index for index, (address, _) in enumerate(lines)}
    loops = []
    for end, (_, instruction) in enumerate(lines):
        jump = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", instruction)
        # The last instruction jumps to itself.
        if jump is not None and places[int(jump[1], 16)] < end:
            loops.append(range(places[int(jump[1], 16)], end + 1))
    innermost = [
        loop for loop in loops
        if not any(other != loop and other[0] in loop and other[-1] in loop for other in loops)
    ]  # fmt: skip
    return [(len(loop), sum("BAR.SYNC" in lines[index][1] for index in loop)) for loop in innermost]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.kernels.compilation", description="Compile the kernels."
    )
    parser.add_argument("--output", type=Path, help="also write the JSON document to this file")
    parser.add_argument("--known", type=Path, help="an earlier output")
    given = parser.parse_args()
    entries = json.loads(given.known.read_text(encoding="utf-8")) if given.known else []
    known = {entry["key"]: Resources(**entry) for entry in entries}
    found = {
        (variant.name, capability): resources_of(variant, capability, known)
        for variants in VARIANTS
        for dtype, capabilities in DTYPES.items()
        for variant in variants(dtype)
        for capability in capabilities
        if capability in variant.capabilities
    }
    for resources in found.values():
        sys.stdout.write(
            f"{resources.name:75} sm_{resources.capability:<4} {resources.registers:3} registers, "
            f"{resources.shared_bytes / 1024:5.1f} KiB shared, {resources.stack_bytes} bytes of stack, "
            f"{resources.loop_instructions} instructions and {resources.loop_barriers} barriers in a loop\n"
        )
    document = [asdict(resources) for resources in found.values()]
    if given.output is not None:
        given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
