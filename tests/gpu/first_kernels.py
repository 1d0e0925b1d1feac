"""The project's kernels at the shapes that people run, in bfloat16, beside plain operations, and their times.

    python -m tests.gpu.first_kernels FOLDER [--fake]

Sizes are those of a rank of Llama: 1B and 8B whole, 70B over four ranks. Every kernel is given the same
numbers as a plain implementation, which shares no code with it; the step fails if one of them differs by more
than rounding. ``seconds`` are the device's, with a cold cache; bytes those that have to be read and written.

T tokens, N distributions, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdist.models.attention.attention import AttentionCall, AttentionRules
from specdist.models.attention.kernel import TritonKernel
from specdist.models.attention.probe import plain_attention
from specdist.models.batch.flat import FlatBatch, ragged_segments
from specdist.models.cache.key_value import SCALE_DTYPE, to_float8
from specdist.models.loading.conversions import Piece
from specdist.models.loading.packed_experts import PackedExperts, ends_of, fill_quantized
from specdist.models.quantized.quantized import MXFP4_FORMAT
from specdist.models.quantized.quantized_linear import Product, QuantizedLinear, products_of
from specdist.models.quantized.quantized_weights import LayerFormat
from specdist.sampling.processing.row_filters import plain_probabilities
from specdist.utils.errors import short_text
from tests.gpu.first_device import Bench, Shape, say, step, table
from tests.kernels import plain

PAGE_SIZE = 16
RULES = AttentionRules(None, None, None)
SINKS = AttentionRules(None, 128, None, has_sinks=True)
# Of DeepSeek's 576 numbers the last 64 are rotated, and no value.
LATENTS, ROTATED_PART = AttentionRules(None, None, None, is_latent=True), 9
KERNELS = {RULES: "attention", SINKS: "attention with sinks and a window", LATENTS: "attention to latents"}
# (sequences, queries of each, keys of each).
ATTENTION = {
    "decode": (32, 1, 2048),
    "decode, long": (4, 1, 16384),
    "verify": (32, 5, 2048),
    "prompt": (1, 2048, 2048),
    "chunk": (1, 512, 8192),
}
TINY_ATTENTION = {
    "decode": (3, 1, 20),
    "decode, long": (1, 1, 600),
    "verify": (3, 5, 40),
    "prompt": (1, 40, 40),
}
NUM_TOKENS, TINY_NUM_TOKENS = (1, 160, 2048), (1, 7)
NUM_ROWS, TINY_NUM_ROWS = (1, 32, 160), (1, 3)
VOCAB_SIZE, TINY_VOCAB_SIZE = 128256, 1500
TEMPERATURE = 0.8
# As wide as those of trained models, whose best tokens have most of the mass.
LOGITS_STD = 4.0
FILTERS: dict[str, tuple[int, float]] = {
    "none": (0, 1.0), "top_k": (50, 1.0), "top_p": (0, 0.9), "top_k and top_p": (50, 0.9)
}  # fmt: skip
# Roundings of bfloat16, of |difference| / (size + |number|), the size being that of a head's numbers, or 1;
# or of the norm. In the interpreter attention differs by 0.007 to 0.009, whatever the number of keys; one key
# of 16,384 that is left out makes 0.04, a scale that is wrong by a hundredth 0.03.
ATTENTION_LIMIT, LAYER_LIMIT, QUANTISED_LIMIT = 2.5e-2, 1.6e-2, 2e-2
# Total variation; a sum that is rounded otherwise may put a threshold next to where it was.
MASS_LIMIT, ROWS_PER_OTHER_THRESHOLD = 1e-4, 32
EPSILON = 1e-5
QUANTISED = {
    "float8": LayerFormat(numbers="float8", rows=1, columns=None, activations="token"),
    "int8": LayerFormat(numbers="int8", rows=1, columns=None, activations="token"),
    "int8 weights": LayerFormat(numbers="int8", rows=1, columns=None),
    "int4 weights": LayerFormat(numbers="int4", rows=1, columns=64),
}
EXPERTS = {"MXFP4": MXFP4_FORMAT, "FP8 in blocks": LayerFormat(numbers="float8", rows=128, columns=128)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel with its numbers; ``limit``: of what ``difference`` finds between it and plain operations."""

    kernel: str
    size: str
    run: Callable[[], Any]
    plain: Callable[[], Any]
    difference: Callable[[Any, Any], float]
    limit: float
    num_bytes: int = 0
    num_flop: int = 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """``difference`` is infinite where a number is not finite or the kernel raised an error, which is the
    ``reason``; None where a job would do without the kernel. What cannot be replayed is not right, either."""

    model: str
    kernel: str
    size: str
    difference: float | None
    limit: float
    seconds: float | None
    gb_per_s: float | None
    tflop_per_s: float | None
    reason: str = ""

    @property
    def is_right(self) -> bool:
        return self.difference is None or (self.difference <= self.limit and not self.reason)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return step(str(__doc__).partition("\n")[0], compare_all, arguments)


def compare_all(bench: Bench, folder: Path) -> int:
    outcomes = [
        outcome
        for shape in bench.shapes.values()
        for outcome in compared(bench, shape.name, cases_of(bench, shape))
    ]
    outcomes += compared(bench, "DeepSeek V3 tp 8", latent_cases(bench))
    outcomes += compared(bench, "all", sampling_cases(bench))
    outcomes += compared(bench, "8B", quantised_cases(bench, bench.shapes["8B"]), refuses=True)
    outcomes += compared(bench, "gpt-oss-120b", expert_cases(bench))
    say(table(outcomes))
    bench.write(folder / "kernels.json", {"kernels": [asdict(outcome) for outcome in outcomes]})
    wrong = [outcome for outcome in outcomes if not outcome.is_right]
    for outcome in wrong:
        about = f"{outcome.model}, {outcome.kernel}, {outcome.size}"
        say(f"WRONG: {about}: {outcome.reason or outcome.difference}")
    num_used = sum(outcome.difference is not None for outcome in outcomes)
    say(f"{num_used - len(wrong)} of {num_used} kernels are right")
    return 1 if wrong else 0


def compared(bench: Bench, model: str, cases: Iterator[Case], *, refuses: bool = False) -> Iterator[Outcome]:
    """``refuses``: a kernel that raises an error is not a fault, since a job does not use it."""
    for case in cases:
        difference, reason, seconds = None, "", None
        try:
            difference = case.difference(case.run(), case.plain())
            seconds = bench.device_s(case.run)
        except Exception as error:  # compilers, libraries and drivers raise errors of many kinds
            reason = short_text(error)
            if refuses:
                difference = None
            elif difference is None:
                difference = float("inf")
        yield Outcome(
            model=model,
            kernel=case.kernel,
            size=case.size,
            # What is not a number is not near.
            difference=float("inf") if difference is not None and math.isnan(difference) else difference,
            limit=case.limit,
            seconds=seconds,
            gb_per_s=case.num_bytes / seconds / 1e9 if seconds and case.num_bytes else None,
            tflop_per_s=case.num_flop / seconds / 1e12 if seconds and case.num_flop else None,
            reason=reason,
        )


def cases_of(bench: Bench, shape: Shape) -> Iterator[Case]:
    """Attention, and the small steps of a layer."""
    for name, lengths in (TINY_ATTENTION if bench.is_fake else ATTENTION).items():
        for rules in (RULES, SINKS):
            yield attention_case(bench, shape, name, *lengths, rules=rules)
        yield attention_case(bench, shape, name, *lengths, rules=RULES, is_float8=True)
    for num_tokens in TINY_NUM_TOKENS if bench.is_fake else NUM_TOKENS:
        yield from layer_cases(bench, shape, num_tokens)


def latent_cases(bench: Bench) -> Iterator[Case]:
    """Attention of a rank's heads to latents, which are one key of all of them, and its value."""
    some = next(iter(bench.shapes.values()))
    num_heads, width = (4, 40) if bench.is_fake else (16, 576)
    shape = replace(some, num_heads=num_heads, num_kv_heads=1, width=width)
    for name, lengths in (TINY_ATTENTION if bench.is_fake else ATTENTION).items():
        yield attention_case(bench, shape, name, *lengths, rules=LATENTS)


def layer_cases(bench: Bench, shape: Shape, num_tokens: int) -> Iterator[Case]:
    from specdist.kernels import layers, rotary

    def case(name: str, num_bytes: int, *numbers: Any, **form: Any) -> Case:
        kernel, twin = getattr(rotary if name == "rotary" else layers, name), getattr(plain, name)
        return Case(
            kernel=name,
            size=f"{num_tokens} tokens",
            run=lambda: kernel(*numbers, **form),
            plain=lambda: twin(*numbers, **form),
            difference=largest_difference,
            limit=LAYER_LIMIT,
            num_bytes=num_bytes,
        )

    form = {"epsilon": EPSILON, "weight_offset": 0.0, "rounds_first": True}
    rows, residual = (bench.random(num_tokens, shape.hidden_size, seed=seed) for seed in (0, 1))
    weight = bench.random(shape.hidden_size, seed=2)
    yield case("rms_norm", 2 * rows.nbytes, rows, weight, **form)
    yield case("residual_norm", 4 * rows.nbytes, rows, residual, None, weight, **form)
    gates, ups = (bench.random(num_tokens, shape.inner_size, seed=seed) for seed in (3, 4))
    yield case("gated_activation", 3 * gates.nbytes, gates, ups, is_tanh=False)
    queries = bench.random(num_tokens, shape.num_heads, shape.width, seed=5)
    keys, values = (bench.random(num_tokens, shape.num_kv_heads, shape.width, seed=seed) for seed in (6, 7))
    angles = bench.random(num_tokens, shape.width, seed=8)
    yield case("rotary", 2 * (queries.nbytes + keys.nbytes), queries, keys, angles.cos(), angles.sin())
    rotation = queries, angles.cos(), angles.sin()
    for own, is_float8 in itertools.product(((), rotation), (False, True)):
        yield writing_case(bench, shape, keys, values, *own, is_float8=is_float8)


def attention_case(
    bench: Bench,
    shape: Shape,
    name: str,
    num_rows: int,
    num_queries: int,
    num_keys: int,
    *,
    rules: AttentionRules,
    is_float8: bool = False,
) -> Case:
    """On scattered pages, perhaps in 8 bits."""
    width = -(-num_keys // PAGE_SIZE)
    table_SP = np.random.default_rng(0).permutation(num_rows * width).reshape(num_rows, width)
    rows = np.repeat(np.arange(num_rows), num_queries)
    positions = np.tile(np.arange(num_keys - num_queries, num_keys), num_rows)
    batch = FlatBatch(np.zeros(len(rows), np.int64), rows, positions)
    segments, _ = ragged_segments(batch, table_SP, PAGE_SIZE, bench.device)
    queries = bench.random(len(rows), shape.num_heads, shape.width)
    of_pages = num_rows * width, PAGE_SIZE, shape.num_kv_heads, shape.width
    key_pages, value_pages = (bench.random(*of_pages, seed=seed) for seed in (1, 2))
    if rules.is_latent:
        value_pages = key_pages[..., : -(shape.width // ROTATED_PART)]
    sinks = 4 + bench.random(shape.num_heads, seed=3) if rules.has_sinks else None
    scales = None
    if is_float8:
        (key_pages, key_scales), (value_pages, value_scales) = map(to_float8, (key_pages, value_pages))
        scales = key_scales, value_scales
    call = AttentionCall(queries, key_pages, value_pages, rules, sinks, scales)
    window = rules.window or num_keys
    num_pairs = num_rows * num_queries * min(window, num_keys - (num_queries - 1) / 2)
    num_read = num_rows * min(num_keys, window + num_queries) * shape.num_kv_heads * shape.width
    return Case(
        kernel=KERNELS[rules] + " over float8" * is_float8,
        size=f"{name}: {num_rows} x {num_queries} after {num_keys - num_queries}",
        run=lambda: TritonKernel().attend(call, segments),
        plain=lambda: plain_attention(call, segments),
        difference=difference_in_heads,
        limit=ATTENTION_LIMIT,
        num_bytes=2 * queries.nbytes + (1 if rules.is_latent else 2) * num_read * key_pages.itemsize,
        num_flop=int(4 * shape.num_heads * shape.width * num_pairs),
    )


def writing_case(
    bench: Bench, shape: Shape, keys: Tensor, values: Tensor, *rotation: Tensor, is_float8: bool
) -> Case:
    """Keys, perhaps rotated, and values, each to a place of its own in the cache."""
    from specdist.kernels import rotary

    name = "write_rotated" if rotation else "write_tokens"
    kernel, twin = getattr(rotary, name), plain.write_rotated if rotation else plain.plain_write
    sizes = [(shape.width, torch.uint8), (1, SCALE_DTYPE)] if is_float8 else [(shape.width, keys.dtype)]
    num_places = 2 * len(keys)
    index = torch.from_numpy(np.random.default_rng(0).permutation(num_places)[: len(keys)]).to(bench.device)
    found, expected = (
        [torch.zeros(num_places, shape.num_kv_heads, width, dtype=dtype, device=bench.device)
         for width, dtype in sizes for _ in range(2)]
        for _ in range(2)
    )  # fmt: skip

    def write(writer: Callable[..., object], pages: list[Tensor]) -> list[Tensor]:
        writer(*pages[:2], index, keys, values, *rotation, *pages[2:])
        return pages

    return Case(
        kernel=name + " as float8" * is_float8,
        size=f"{len(keys)} tokens",
        run=lambda: write(kernel, found),
        plain=lambda: write(twin, expected),
        difference=share_of_others,
        limit=0.0,
        num_bytes=(keys.nbytes + values.nbytes) * (3 if is_float8 else 4) // 2,
    )


def sampling_cases(bench: Bench) -> Iterator[Case]:
    """Distributions from logits, and draws from them."""
    vocab_size = TINY_VOCAB_SIZE if bench.is_fake else VOCAB_SIZE
    for num_rows in TINY_NUM_ROWS if bench.is_fake else NUM_ROWS:
        logits = LOGITS_STD * bench.random(num_rows, vocab_size)
        for name, (top_k, top_p) in FILTERS.items():
            yield filter_case(logits, name, temperature=TEMPERATURE, top_k=top_k, top_p=top_p)
        yield from draw_cases(plain_probabilities(logits, temperature=TEMPERATURE, top_k=0, top_p=1.0))


def filter_case(logits: Tensor, name: str, **options: Any) -> Case:
    from specdist.kernels import sampling

    return Case(
        kernel=f"distribution, {name}",
        size=size_of(logits),
        run=lambda: sampling.processed_probabilities(logits, **options),
        # In float64, so that no sum of its own moves a threshold.
        plain=lambda: plain_probabilities(logits.double(), **options),
        difference=variation,
        limit=MASS_LIMIT,
        num_bytes=3 * logits.nbytes,  # and float32 probabilities
    )


def draw_cases(probabilities: Tensor) -> Iterator[Case]:
    from specdist.kernels import sampling

    rng, num_rows = np.random.default_rng(0), len(probabilities)
    uniforms = torch.from_numpy(rng.random(num_rows)).to(probabilities.device)
    words = torch.from_numpy(rng.integers(-(2**63), 2**63, size=num_rows)).to(probabilities.device)
    pairs: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
        "draw": (
            lambda: sampling.draw(probabilities, uniforms, not_finite=-1),
            lambda: plain_draw(probabilities, uniforms),
        ),
        "race": (
            lambda: sampling.race(probabilities, words, not_finite=-1),
            lambda: plain.race(probabilities, words, not_finite=-1),
        ),
    }
    for kernel, (run, twin) in pairs.items():
        yield Case(
            kernel=kernel,
            size=size_of(probabilities),
            run=run,
            plain=twin,
            difference=share_of_others,
            limit=0.0,
            num_bytes=probabilities.nbytes,
        )


def size_of(numbers_NV: Tensor) -> str:
    return " x ".join(map(str, numbers_NV.shape))


def plain_draw(probabilities_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """The first id whose cumulative mass exceeds u × total."""
    masses_NV = probabilities_NV.double().cumsum(1)
    return (masses_NV <= uniforms_N[:, None] * masses_NV[:, -1:]).sum(1)


def quantised_cases(bench: Bench, shape: Shape) -> Iterator[Case]:
    """Torch's products of quantised numbers, as quantised layers use them, beside dequantised ones."""
    num_outputs, num_inputs = shape.hidden_size, shape.inner_size
    weight = bench.random(num_outputs, num_inputs)
    for name, form in QUANTISED.items():
        layer = QuantizedLinear(form, num_outputs, num_inputs).to_empty(device=bench.device)
        fill_quantized(layer, Piece.whole("", weight.shape), weight)
        for kernel, make in products_of(layer, torch.bfloat16).items():
            product = functools.cache(make)
            for num_tokens in TINY_NUM_TOKENS if bench.is_fake else NUM_TOKENS:
                tokens = bench.random(num_tokens, num_inputs, seed=1)
                yield quantised_case(f"{name}: {kernel}", layer, product, tokens)


def expert_cases(bench: Bench) -> Iterator[Case]:
    """Of the first product of a layer of gpt-oss-120b, in two formats: one launch for all experts beside
    one expert after the other."""
    num_experts, num_outputs, num_inputs = (4, 64, 128) if bench.is_fake else (128, 5760, 2880)
    for name, form in EXPERTS.items():
        shape = (num_experts, num_outputs, num_inputs)
        packed = PackedExperts(form, shape, None, is_transposed=False).to_empty(device=bench.device)
        for each in packed.buffers():
            each.view(torch.uint8).random_(120, 124)  # scales near one, and numbers of both signs
        if not form.has_powers:
            packed.scales.fill_(0.5)
        for num_tokens in TINY_NUM_TOKENS if bench.is_fake else NUM_TOKENS:
            yield expert_case(f"experts, {name}", packed, bench.random(4 * num_tokens, num_inputs, seed=1))


def expert_case(kernel: str, packed: PackedExperts, tokens: Tensor) -> Case:
    generator = torch.Generator().manual_seed(2)
    ids_S = torch.randint(packed.num_experts, (len(tokens),), generator=generator).sort().values
    ends_E = ends_of(ids_S.to(tokens.device), packed.num_experts)
    share = len(ids_S.unique()) / packed.num_experts
    return Case(
        kernel=kernel,
        size=f"{len(tokens)} tokens",
        run=lambda: packed.kernel_product(tokens, ends_E),
        plain=lambda: packed.dequantized_product(tokens, ends_E),
        difference=relative_norm,
        limit=QUANTISED_LIMIT,
        num_bytes=int(share * packed.num_bytes),
        num_flop=2 * len(tokens) * packed.out_features * packed.in_features,
    )


def quantised_case(
    kernel: str, layer: QuantizedLinear, product: Callable[[], Product], tokens: Tensor
) -> Case:
    found = layer.rounded(tokens)
    return Case(
        kernel=kernel,
        size=f"{len(tokens)} tokens",
        run=lambda: product()(tokens, found),
        plain=lambda: layer.dequantized_product(tokens, found),
        difference=relative_norm,
        limit=QUANTISED_LIMIT,
        num_bytes=layer.weight.numbers.nbytes,
        num_flop=2 * len(tokens) * layer.out_features * layer.in_features,
    )


def largest_difference(found: Any, expected: Any) -> float:
    """Of |difference| / (1 + |number|), over all results."""
    return max(
        float(((one.float() - other.float()).abs() / (1 + other.float().abs())).max())
        for one, other in pairs_of(found, expected)
    )


def share_of_others(found: Any, expected: Any) -> float:
    """Of numbers that are not the same."""
    return max(float((one != other).float().mean()) for one, other in pairs_of(found, expected))


def pairs_of(found: Any, expected: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Of one tensor or several."""
    return zip(*([each] if isinstance(each, Tensor) else each for each in (found, expected)), strict=True)


def difference_in_heads(found_THD: Tensor, expected_THD: Tensor) -> float:
    """Of |difference| / (size of the head's numbers + |number|): averages of many values are small."""
    size_TH1 = expected_THD.square().mean(-1, keepdim=True).sqrt()
    return float(((found_THD.float() - expected_THD).abs() / (size_TH1 + expected_THD.abs())).max())


def relative_norm(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def variation(found_NV: Tensor, expected_NV: Tensor) -> float:
    """Total variation of the distributions, but for one in so many whose threshold may be another."""
    distances_N = (found_NV - expected_NV).abs().sum(1) / 2
    if not bool(distances_N.isfinite().all()):
        return float("inf")
    return float(distances_N.sort(descending=True).values[len(distances_N) // ROWS_PER_OTHER_THRESHOLD])


if __name__ == "__main__":
    sys.exit(main())
