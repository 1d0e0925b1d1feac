"""What a device needs for what passes are made of: products, launches, nodes of graphs, waits, sampling.

    python -m tests.gpu.first_costs FOLDER [--fake]

Products are those of a layer, joined or not, in a graph that goes through copies of its matrices, more than
a cache holds: with few tokens they show the rate at which weights are read, with many that of arithmetic.
Inputs of FP8 have been rounded. Grouped products of experts show whether they take the time of reading the
distinct ones, as the planner reckons.

T tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear

from specdist.models.quantized.quantized_linear import FAST, QuantizedLinear, products_of
from specdist.models.quantized.quantized_weights import LayerFormat
from specdist.utils.trial import why_not
from tests.gpu.first_device import LLAMA, Bench, Shape, say, step, table
from tests.gpu.first_kernels import (
    FILTERS,
    LOGITS_STD,
    NUM_ROWS,
    TEMPERATURE,
    TINY_NUM_ROWS,
    TINY_VOCAB_SIZE,
    VOCAB_SIZE,
)

# More than the cache of any device.
CYCLED_BYTES, TINY_CYCLED_BYTES = 2**29, 2**16
NUM_TOKENS, TINY_NUM_TOKENS = (1, 8, 32, 160, 512, 2048), (1, 8)
# Of the figures that a planner takes: one token reads, many multiply.
READING_TOKENS, MULTIPLYING_TOKENS, TINY_MULTIPLYING_TOKENS = 1, 512, 8
NUM_LAUNCHES, TINY_NUM_LAUNCHES = 1000, 20
FEW_NODES = 0.1
FLOAT8_DTYPE = "float8_e4m3fn"
DTYPES = ("bfloat16", "float32", FLOAT8_DTYPE)
MODEL, EXPERTS = "8B", "experts of a 30B-A3B"
TWO_RANKS = replace(LLAMA["70B tp 4"], name="70B tp 2", inner_size=14336, num_heads=32, num_kv_heads=4)
# The kernels of FP8, with scales of tokens and rows, and with stored ones.
FLOAT8 = {
    "torch._scaled_mm by rows": LayerFormat(numbers="float8", rows=1, columns=None, activations="token"),
    "torch._scaled_mm": LayerFormat(numbers="float8", rows=None, columns=None, activations="static"),
}
# What the kernel of few tokens takes; and the rounding of bfloat16, of the norm.
FEW_TOKENS, TINY_FEW_TOKENS, WAY_LIMIT = (1, 8, 32, 64), (1, 5), 5e-3


@dataclass(frozen=True, kw_only=True)
class Products:
    """All products of a layer of a model, one after the other; ``kernel``: of FP8."""

    model: str
    dtype: str
    kernel: str
    is_joined: bool
    num_tokens: int
    seconds: float
    gb_per_s: float
    tflop_per_s: float


@dataclass(frozen=True, kw_only=True)
class WayOfProduct:
    """A product by one way; ``difference``: of the norm, from torch's."""

    model: str
    matrix: str
    num_tokens: int
    way: str
    difference: float
    seconds: float
    gb_per_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return step(str(__doc__).partition("\n")[0], measure_all, arguments)


def measure_all(bench: Bench, folder: Path) -> int:
    launches = launch_costs(bench)
    for name, seconds in launches.items():
        say(f"{name}: {1e6 * seconds:.2f} us")
    many = TINY_MULTIPLYING_TOKENS if bench.is_fake else MULTIPLYING_TOKENS
    all_tokens = TINY_NUM_TOKENS if bench.is_fake else NUM_TOKENS
    products = [
        layer_products(bench, shape, num_tokens, dtype=torch.bfloat16, is_joined=is_joined)
        for shape in (*bench.shapes.values(), *([] if bench.is_fake else [TWO_RANKS]))
        for is_joined in (True, False)
        for num_tokens in all_tokens
    ]
    products += float8_products(bench, all_tokens)
    products += [expert_products(bench, num_tokens) for num_tokens in all_tokens]
    products.append(layer_products(bench, bench.shapes[MODEL], many, dtype=torch.float32, is_joined=True))
    say("\n" + table(products))
    ways = [way for shape in bench.shapes.values() for way in ways_of_products(bench, shape)]
    say("\n" + table(ways))
    wrong = [way for way in ways if not way.difference <= WAY_LIMIT]
    say(f"{len(wrong)} of {len(ways)} ways of products are wrong")
    sampling = sampling_costs(bench)
    say("\n" + "\n".join(_sampling_line(one) for one in sampling))

    def of(num_tokens: int, dtype: str) -> Products | None:
        """The fastest of the joined products of a layer of the model."""
        wanted = (MODEL, dtype, num_tokens, True)
        found = [
            each for each in products if (each.model, each.dtype, each.num_tokens, each.is_joined) == wanted
        ]
        return min(found, key=lambda each: each.seconds, default=None)

    rates = {dtype: each.tflop_per_s for dtype in DTYPES if (each := of(many, dtype)) is not None}
    reading, reading_float8 = of(READING_TOKENS, "bfloat16"), of(READING_TOKENS, FLOAT8_DTYPE)
    assert reading is not None
    found = {
        **launches,
        "read_bytes_per_s": 1e9 * reading.gb_per_s,
        "float8_bytes_per_s": None if reading_float8 is None else 1e9 * reading_float8.gb_per_s,
        "flops_per_s": {dtype.partition("_")[0]: 1e12 * rate for dtype, rate in rates.items()},
        "sampling": sampling,
    }
    # A cost that comes out as a difference of two times may be lost in them.
    lost = [name for name, seconds in launches.items() if not seconds > 0]
    if lost and not bench.is_fake:
        say(f"not to be measured here, since other times vary more: {', '.join(lost)}")
    content = {"device": bench.identity(), "costs": found, "products": [asdict(each) for each in products]}
    bench.write(folder / "costs.json", content | {"ways": [asdict(each) for each in ways]})
    return 1 if wrong or (lost and not bench.is_fake) else 0


def launch_costs(bench: Bench) -> dict[str, float]:
    """Seconds of a kernel that does next to nothing: launched by itself, and one more of a graph; of a graph
    with one kernel; and of the host's waiting for a kernel, beside its launch."""
    number = torch.zeros(1, device=bench.device)
    many = TINY_NUM_LAUNCHES if bench.is_fake else NUM_LAUNCHES
    few = max(1, int(FEW_NODES * many))

    def nodes(count: int) -> Callable[[], None]:
        def add() -> None:
            for _ in range(count):
                number.add_(1)

        return add

    def launch_and_wait() -> None:
        number.add_(1)
        torch.cuda.synchronize()

    launch_s = bench.host_s(lambda: number.add_(1), many)
    difference_s = bench.device_s(nodes(many)) - bench.device_s(nodes(few))
    return {
        "launch_s": launch_s,
        "graph_node_s": difference_s / (many - few),
        "graph_s": bench.host_s(bench.recorded(nodes(1)), many),
        "wait_s": bench.host_s(launch_and_wait, many) - launch_s,
    }


def layer_products(
    bench: Bench, shape: Shape, num_tokens: int, *, dtype: torch.dtype, is_joined: bool, kernel: str = ""
) -> Products:
    """The products of several layers in one graph. Raises an error for a kernel that the device has not."""
    matrices = shape.joined if is_joined else shape.matrices
    layer_bytes = dtype.itemsize * sum(rows * columns for rows, columns in matrices)
    cycled_bytes = TINY_CYCLED_BYTES if bench.is_fake else CYCLED_BYTES
    plain = torch.bfloat16 if kernel else dtype
    tokens = {width: bench.random(num_tokens, width, dtype=plain) for _, width in matrices}
    products = [
        product(bench, size, seed, tokens[size[1]], kernel)
        for seed in range(-(-cycled_bytes // layer_bytes))
        for size in matrices
    ]

    def multiply() -> None:
        for each in products:
            each()

    seconds = bench.device_s(multiply) / len(products) * len(matrices)
    return Products(
        model=shape.name,
        dtype=str(dtype).removeprefix("torch."),
        kernel=kernel,
        is_joined=is_joined,
        num_tokens=num_tokens,
        seconds=seconds,
        gb_per_s=layer_bytes / seconds / 1e9,
        tflop_per_s=2 * num_tokens * layer_bytes / dtype.itemsize / seconds / 1e12,
    )


def product(
    bench: Bench, size: tuple[int, int], seed: int, tokens: Tensor, kernel: str
) -> Callable[[], Tensor]:
    """Of random numbers; of FP8 with inputs that have been rounded."""
    if not kernel:
        return partial(linear, tokens, bench.random(*size, dtype=tokens.dtype, seed=seed))
    layer = QuantizedLinear(FLOAT8[kernel.removesuffix(FAST)], *size).to_empty(device=bench.device)
    layer.weight.numbers.copy_(bench.random(*size, seed=seed))
    for name, scales in layer.named_buffers():
        if name != "numbers":
            scales.fill_(1.0)
    run = products_of(layer, torch.bfloat16)[kernel]()
    return partial(run, tokens, layer.rounded(tokens))


def float8_products(bench: Bench, all_tokens: Sequence[int]) -> Iterator[Products]:
    """Of 8B, and of 70B over two ranks and over four; a kernel that a device has not is said once."""
    shapes = [bench.shapes[MODEL], *([] if bench.is_fake else [TWO_RANKS, LLAMA["70B tp 4"]])]
    for kernel in [name + fast for name in FLOAT8 for fast in ("", FAST)]:
        measured = partial(layer_products, bench, dtype=torch.float8_e4m3fn, kernel=kernel)
        if reason := why_not(partial(measured, shapes[0], all_tokens[0], is_joined=True)):
            say(f"{kernel}: {reason}")
            continue
        for shape, is_joined, num_tokens in itertools.product(shapes, (True, False), all_tokens):
            yield measured(shape, num_tokens, is_joined=is_joined)


def ways_of_products(bench: Bench, shape: Shape) -> Iterator[WayOfProduct]:
    """Few tokens with a layer's matrices, joined and not, and with the output head: by cuBLAS, cuBLASLt, and
    the project's kernel, also with weights in 8 bits."""
    from specdist.kernels.products import few_tokens_product

    queries, (keys, hidden), _, output, (inner, _), _, down = shape.matrices
    sizes = {
        "q": queries, "q, k and v": (queries[0] + 2 * keys, hidden), "o": output, "gate": (inner, hidden),
        "gate and up": (2 * inner, hidden), "down": down, "head": (shape.vocab_size, hidden),
    }  # fmt: skip
    for name, size in sizes.items():
        weight = bench.random(*size)
        # These numbers are near in 8 bits, and made equal, so that every way has the same product.
        narrow = weight.to(torch.float8_e4m3fn)
        weight, scales = narrow.to(weight.dtype), torch.ones(1, 1, device=bench.device)
        arrivals = torch.zeros(size[0], dtype=torch.int32, device=bench.device)
        for num_tokens in TINY_FEW_TOKENS if bench.is_fake else FEW_TOKENS:
            tokens = bench.random(num_tokens, size[1], seed=1)
            options, expected = {"dtype": tokens.dtype}, linear(tokens, weight).float()
            ways: dict[str, Callable[[], Tensor]] = {
                "cuBLAS": partial(linear, tokens, weight),
                "split inputs": partial(few_tokens_product, tokens, weight, None, arrivals, **options),
                "split inputs, float8 weights": partial(
                    few_tokens_product, tokens, narrow, None, arrivals, scales, **options
                ),
            }
            if not bench.is_fake:
                ways["cuBLASLt"] = partial(by_cublaslt, tokens, weight)
            for way, run in ways.items():
                seconds = bench.device_s(run)
                yield WayOfProduct(
                    model=shape.name, matrix=name, num_tokens=num_tokens, way=way, seconds=seconds,
                    difference=float((run().float() - expected).norm() / expected.norm()),
                    gb_per_s=(narrow if "float8" in way else weight).nbytes / seconds / 1e9,
                )  # fmt: skip


def by_cublaslt(tokens: Tensor, weight: Tensor) -> Tensor:
    """Of the ways of torch that need no code: torch.cuda.tunable has none beside cuBLAS's default."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        return linear(tokens, weight)
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def expert_products(bench: Bench, num_tokens: int) -> Products:
    """The grouped products of a layer of Qwen3-30B-A3B, of tokens that choose their experts uniformly; the
    bytes are those of the distinct ones."""
    num_experts, num_chosen, hidden, inner = (8, 2, 64, 32) if bench.is_fake else (128, 8, 2048, 768)
    up, down = bench.random(num_experts, hidden, 2 * inner), bench.random(num_experts, inner, hidden)
    generator = torch.Generator().manual_seed(num_tokens)
    order = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :num_chosen]
    counts = order.flatten().bincount(minlength=num_experts)
    ends = counts.cumsum(0).int().to(bench.device)
    tokens = bench.random(num_tokens * num_chosen, hidden)
    halves = bench.random(num_tokens * num_chosen, inner)

    def multiply() -> None:
        grouped_mm(tokens, up, offs=ends)
        grouped_mm(halves, down, offs=ends)

    seconds = bench.device_s(multiply)
    numbers = 3 * hidden * inner
    return Products(
        model=EXPERTS,
        dtype="bfloat16",
        kernel="",
        is_joined=True,
        num_tokens=num_tokens,
        seconds=seconds,
        gb_per_s=2 * int((counts > 0).sum()) * numbers / seconds / 1e9,
        tflop_per_s=2 * num_tokens * num_chosen * numbers / seconds / 1e12,
    )


def sampling_costs(bench: Bench) -> list[dict[str, Any]]:
    """Seconds of distributions from bfloat16 logits, and of draws from them."""
    from specdist.kernels import sampling

    vocab_size = TINY_VOCAB_SIZE if bench.is_fake else VOCAB_SIZE

    def cost(logits: Tensor, uniforms: Tensor, filters: str) -> dict[str, Any]:
        top_k, top_p = FILTERS[filters]

        def process() -> Tensor:
            return sampling.processed_probabilities(logits, temperature=TEMPERATURE, top_k=top_k, top_p=top_p)

        probabilities = process()
        return {
            "filters": filters,
            "num_rows": len(logits),
            "vocab_size": vocab_size,
            "process_s": bench.device_s(process),
            "draw_s": bench.device_s(lambda: sampling.draw(probabilities, uniforms, not_finite=-1)),
        }

    found = []
    for num_rows in TINY_NUM_ROWS if bench.is_fake else NUM_ROWS:
        logits = LOGITS_STD * bench.random(num_rows, vocab_size)
        uniforms = torch.full((num_rows,), 0.5, dtype=torch.float64, device=bench.device)
        found += [cost(logits, uniforms, filters) for filters in FILTERS]
    return found


def _sampling_line(cost: dict[str, Any]) -> str:
    times = f"{1e6 * cost['process_s']:.1f} us, a draw {1e6 * cost['draw_s']:.1f} us"
    return f"sampling, {cost['num_rows']} x {cost['vocab_size']}, filters {cost['filters']}: {times}"


if __name__ == "__main__":
    sys.exit(main())
