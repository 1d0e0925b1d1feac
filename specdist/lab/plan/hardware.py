"""GPUs for the planner: size and bandwidth of the memory, and arithmetic rates.

Peaks are those of the vendor's data sheets. The share of them that kernels reach is assumed, and so is what
launches and waits take. ``--calibration`` replaces the figures of a row by what was measured on such a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, get_args

from specdist.data.stats.regression import NS_PER_S
from specdist.lab.plan.calibration import Calibration, Filters, MeasuredSampling, MeasuredSum
from specdist.policies.costs import Curve
from specdist.utils.errors import UserError
from specdist.utils.host import GIB

GB = 10**9
TERA = 10**12
US = 1e-6
# Reading a matrix once, as decoding does: copies of a gigabyte reach nine tenths of the memory's peak, and
# kernels of a few dozen microseconds less.
BANDWIDTH_EFFICIENCY = 0.8
# Products of a few hundred tokens with a large matrix; those of thousands come nearer to the peak.
ARITHMETIC_EFFICIENCY = 0.6
# A small all-reduce inside a node by NCCL: its kernel, and the steps over the links. Assumed.
NVLINK_LATENCY_S = 15 * US
PCIE_LATENCY_S = 30 * US
# Of one kernel that reads the parts of all peers over NVLink, beside reading them. Assumed.
ONE_SHOT_LATENCY_S = 5 * US
# Messages of a few megabytes; those of hundreds come nearer to the peak. Assumed.
LINK_EFFICIENCY = 0.7
# A kernel of a replayed graph beside reading, writing and computing: its start and end, and the gap to the
# next. Assumed. "Getting Started with CUDA Graphs" (Gray 2019, developer.nvidia.com/blog/cuda-graphs) reports
# 3.4 microseconds from one short kernel to the next in a graph, most of them the kernel's own.
KERNEL_S = 2 * US
# A kernel or a copy that is launched by itself: the host's work in Python and in torch, which a device waits
# for that has nothing else to do. Assumed.
EAGER_KERNEL_S = 5 * US
# Launching a graph of any size. Assumed.
GRAPH_S = 20 * US
# The host waits for the device, and the device for what the host launches next. Assumed.
SYNCHRONISATION_S = 15 * US
PUBLISHED = "published peaks and assumed shares of them, not measured"
# Attention of prompts over products of a matrix: 127 to 239 of 631 TFLOP/s with heads of 128. Measured on one
# H200, and taken for every GPU.
ATTENTION_RATE = 0.33
# Products of experts, of whole tiles of tokens, over those of one matrix. Fitted to published figures.
EXPERTS_RATE = 0.6
# Keys and values that attention reads, over a matrix: bytes per second. Fitted to published figures; 0.6 to
# 1.0 were measured on one H200.
CACHE_RATE = 0.8


class Rates(NamedTuple):
    """Products of quantised layers over plain ones: bytes of weights, and operations, per second."""

    reads: float
    computes: float


# A matrix of 4,096 x 14,336 beside the bfloat16 layers of an 8B, with 1 and with 2,048 tokens. Measured on
# one H200 (kernels.json and costs.json in jobs/benchmarks/h200), and taken for every GPU with such a product.
MEASURED_RATES = {
    "float8": Rates(0.35, 0.88),
    "int8": Rates(0.32, 0.54),
    "int8 weights": Rates(0.034, 0.0013),
    "int4 weights": Rates(0.41, 0.042),
}
# Without tensor cores for float8 (before compute capability 8.9), or for bfloat16 and 8-bit numbers.
WITHOUT_FLOAT8, WITHOUT_NARROW = ("a100-80", "a100-40", "a10", "a6000", "rtx-3090"), ("v100-32",)
# By its sheet this one gives 0.15 POPS for int8, a fifteenth of its bfloat16 rate; others give twice that.
FEW_INT8 = {"b300": Rates(0.32, 1 / 15)}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device.

    Attributes:
        half_flops_per_s, float_flops_per_s: peaks for dense products of 16-bit and of float32 numbers; torch
            runs float32 products without TF32.
        link_bytes_per_s: to the other GPUs of the node, in one direction.
        link_latency_s: of a small all-reduce among them.
        has_bfloat16: whether 16-bit products may be bfloat16.
        bandwidth_efficiency, arithmetic_efficiency: share of the peaks that kernels reach.
        reserved_bytes: taken by the driver and the CUDA context before anything is loaded.
        products: of quantised layers, by their kind, where torch has a kernel.
        attention_rate, experts_rate: of operations of prompts' attention and of experts, over those of plain
            products; cache_rate: of bytes of keys and values over those of a matrix.
        kernel_s, eager_kernel_s, graph_s, wait_s: of a kernel in a graph beside its work, of one launched by
            itself, of launching a graph, and of a wait of the host for the device.
        sums, sampling: as measured; without any, by bytes.
        device: pattern of the driver's name for it.
        figures: where all these come from.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    half_flops_per_s: float
    float_flops_per_s: float
    link_bytes_per_s: float
    link_latency_s: float
    has_bfloat16: bool = True
    bandwidth_efficiency: float = BANDWIDTH_EFFICIENCY
    arithmetic_efficiency: float = ARITHMETIC_EFFICIENCY
    reserved_bytes: int = GIB
    products: dict[str, Rates] = field(default_factory=dict)
    attention_rate: float = ATTENTION_RATE
    experts_rate: float = EXPERTS_RATE
    cache_rate: float = CACHE_RATE
    kernel_s: float = KERNEL_S
    eager_kernel_s: float = EAGER_KERNEL_S
    graph_s: float = GRAPH_S
    wait_s: float = SYNCHRONISATION_S
    sums: tuple[MeasuredSum, ...] = ()
    sampling: tuple[MeasuredSampling, ...] = ()
    device: str = ""
    figures: str = PUBLISHED

    @property
    def sustained_bytes_per_s(self) -> float:
        """Rate at which kernels read memory."""
        return self.bandwidth_bytes_per_s * self.bandwidth_efficiency

    def sustained_flops_per_s(self, bytes_per_number: int) -> float:
        """Rate of products of numbers of this width."""
        peak = self.half_flops_per_s if bytes_per_number <= 2 else self.float_flops_per_s
        return peak * self.arithmetic_efficiency

    def send_s(self, num_bytes: float) -> float:
        """Seconds that bytes are on their way to another GPU of the node, without the latency."""
        return num_bytes / (LINK_EFFICIENCY * self.link_bytes_per_s)

    def all_reduce_s(self, num_bytes: float, num_ranks: int, *, reads_peers: bool = False) -> float:
        """Seconds to sum ``num_bytes`` over ranks of a node, as measured over so many; else a ring sends
        2 (n - 1) / n of them per link. ``reads_peers``: or every rank reads all others' over NVLink, where
        that is faster."""
        if num_ranks == 1:
            return 0.0
        if num_ranks in self._sum_curves:
            return float(self._sum_curves[num_ranks](num_bytes)) / NS_PER_S
        ring_s = self.link_latency_s + self.send_s(2 * (num_ranks - 1) / num_ranks * num_bytes)
        if not reads_peers or self.link_latency_s != NVLINK_LATENCY_S:
            return ring_s
        return min(ring_s, ONE_SHOT_LATENCY_S + self.send_s((num_ranks - 1) * num_bytes))

    @cached_property
    def _sum_curves(self) -> dict[int, Curve]:
        """Times of sums by number of ranks."""
        found: dict[int, dict[int, float]] = {}
        for one in self.sums:
            found.setdefault(one.num_ranks, {})[one.num_bytes] = one.seconds
        return {num_ranks: _curve(seconds) for num_ranks, seconds in found.items()}

    @cached_property
    def sampling_curves(self) -> dict[Filters, SamplingCurves]:
        """The curves by filters, of those that were measured."""
        names = {one.filters for one in self.sampling}
        return {
            name: SamplingCurves.of([one for one in self.sampling if one.filters == name]) for name in names
        }

    def is_named(self, device: str) -> bool:
        """Whether a driver's name is that of such a GPU."""
        return re.search(self.device, device) is not None

    def calibrated(self, found: Calibration, source: str) -> Gpu:
        """This GPU with what was measured; its links stay as they are where a single GPU was."""
        assert found.half_flops_per_s is not None
        products, float8_flops_per_s = self.products, found.flops_per_s.get("float8")
        if found.float8_bytes_per_s is not None and float8_flops_per_s is not None:
            reads = found.float8_bytes_per_s / found.read_bytes_per_s
            products = products | {"float8": Rates(reads, float8_flops_per_s / found.half_flops_per_s)}
        return replace(
            self,
            memory_bytes=found.memory_bytes,
            bandwidth_bytes_per_s=found.read_bytes_per_s,
            half_flops_per_s=found.half_flops_per_s,
            float_flops_per_s=found.flops_per_s["float32"],
            bandwidth_efficiency=1.0,
            arithmetic_efficiency=1.0,
            products=products,
            kernel_s=found.graph_node_s,
            eager_kernel_s=found.launch_s,
            graph_s=found.graph_s,
            wait_s=found.wait_s,
            sums=found.all_reduce,
            sampling=found.sampling,
            figures=f"measured on one {found.gpu_name} on {found.date[:10]}, {source}{_unmeasured(found)}",
        )


def _unmeasured(found: Calibration) -> str:
    """What stays as it was, for a message."""
    names = [] if found.all_reduce else ["sums over GPUs"]
    filters = [name for name in get_args(Filters) if name not in {one.filters for one in found.sampling}]
    names += [f"sampling with filters {', '.join(filters)}"] if filters else []
    return f"; not measured: {' and '.join(names)}" if names else ""


@dataclass(frozen=True)
class SamplingCurves:
    """Measured seconds by the number of rows, of ``vocab_size`` ids; in proportion of others."""

    vocab_size: int
    process: Curve
    draw: Curve

    @staticmethod
    def of(found: Sequence[MeasuredSampling]) -> SamplingCurves:
        size = found[0].vocab_size
        scaled = [(one, size / one.vocab_size) for one in found]
        return SamplingCurves(
            size,
            _curve({one.num_rows: scale * one.process_s for one, scale in scaled}),
            _curve({one.num_rows: scale * one.draw_s for one, scale in scaled}),
        )

    def process_s(self, num_rows: float, vocab_size: int) -> float:
        """Seconds from logits to distributions."""
        return float(self.process(num_rows)) / NS_PER_S * vocab_size / self.vocab_size

    def draw_s(self, num_rows: float, vocab_size: int) -> float:
        """Seconds to draw from each."""
        return float(self.draw(num_rows)) / NS_PER_S * vocab_size / self.vocab_size


def _curve(seconds: dict[int, float]) -> Curve:
    sizes = sorted(seconds)
    return Curve(sizes, [round(seconds[size] * NS_PER_S) for size in sizes])


def _gpu(
    name: str, memory_gb: float, bandwidth_gb: float, half_tera: float, float_tera: float, link_gb: float,
    device: str, *, is_nvlink: bool, has_bfloat16: bool = True,
) -> Gpu:  # fmt: skip
    return Gpu(
        name=name,
        memory_bytes=int(memory_gb * GIB),
        bandwidth_bytes_per_s=bandwidth_gb * GB,
        half_flops_per_s=half_tera * TERA,
        float_flops_per_s=float_tera * TERA,
        link_bytes_per_s=link_gb * GB,
        link_latency_s=NVLINK_LATENCY_S if is_nvlink else PCIE_LATENCY_S,
        has_bfloat16=has_bfloat16,
        device=device,
        products={
            kind: FEW_INT8.get(name, rates) if kind == "int8" else rates
            for kind, rates in MEASURED_RATES.items()
            if name not in WITHOUT_NARROW and (kind != "float8" or name not in WITHOUT_FLOAT8)
        },
    )


# NVIDIA's data sheets and architecture whitepapers of each product; tensor figures are dense ones, half of
# those "with sparsity". Memory in GiB is about what the driver reports, which is less than the sheet's.
# Links: half of NVLink's total, which counts both directions (900 GB/s for H100 and H200 SXM, 600 for A100,
# 300 for V100), else one direction of PCIe (64 GB/s for generation 5 × 16, 32 for generation 4).
# columns: memory GiB, bandwidth GB/s, 16-bit TFLOP/s, float32 TFLOP/s, link GB/s, the driver's name
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("b300", 267, 8000, 2250, 75, 900, r"\bG?B300\b", is_nvlink=True),
        _gpu("b200", 179, 8000, 2250, 75, 900, r"\bG?B200\b", is_nvlink=True),
        _gpu("h200", 140, 4800, 989, 67, 450, r"\bH200\b|GH200 144", is_nvlink=True),
        _gpu("gh200", 94.5, 4000, 989, 67, 64, r"GH200 (120|480)GB", is_nvlink=False),
        _gpu("h100-sxm", 79.6, 3350, 989, 67, 450, r"H100 80GB HBM3", is_nvlink=True),
        _gpu("h100-nvl", 93.1, 3938, 835, 60, 64, r"H100 NVL", is_nvlink=False),
        _gpu("h100-pcie", 79.6, 2000, 756, 51, 64, r"H100 PCIe", is_nvlink=False),
        _gpu("h20", 95.0, 4000, 148, 44, 450, r"\bH20\b", is_nvlink=True),
        _gpu("a100-80", 79.3, 2039, 312, 19.5, 300, r"A100.*80GB", is_nvlink=True),
        _gpu("a100-40", 39.4, 1555, 312, 19.5, 300, r"A100.*40GB", is_nvlink=True),
        _gpu("l40s", 44.5, 864, 362, 91.6, 32, r"\bL40S\b", is_nvlink=False),
        _gpu("a6000", 47.4, 768, 155, 38.7, 32, r"RTX A6000\b", is_nvlink=False),
        _gpu("l4", 22.5, 300, 121, 30.3, 32, r"\bL4\b", is_nvlink=False),
        _gpu("a10", 22.5, 600, 125, 31.2, 32, r"\bA10G?\b", is_nvlink=False),
        _gpu("v100-32", 31.7, 900, 125, 15.7, 150, r"V100.*32GB", is_nvlink=True, has_bfloat16=False),
        _gpu("rtx-pro-6000", 94.9, 1792, 504, 125, 64, r"RTX PRO 6000\b(?!.*Server)", is_nvlink=False),
        _gpu("rtx-pro-6000-server", 94.9, 1597, 500, 120, 64, r"RTX PRO 6000\b.*Server", is_nvlink=False),
        _gpu("rtx-5090", 31.4, 1792, 210, 105, 64, r"RTX 5090\b", is_nvlink=False),
        _gpu("rtx-4090", 23.6, 1008, 165, 82.6, 32, r"RTX 4090\b", is_nvlink=False),
        _gpu("rtx-3090", 23.6, 936, 71, 35.6, 32, r"RTX 3090\b", is_nvlink=False),
    )
}


def named_gpu(name: str) -> Gpu:
    """A row of the table. Raises :class:`UserError` for another name."""
    if name.lower() not in GPUS:
        raise UserError(f"--gpu {name} is not in the table: choose one of {', '.join(GPUS)}")
    return GPUS[name.lower()]


def find_gpu(name: str, dtype: str, calibration: str | None = None) -> Gpu:
    """A row of the table, with what the file ``calibration`` says of such a GPU. Raises :class:`UserError`
    for another name, an unsupported ``dtype``, and a file of another GPU."""
    gpu = named_gpu(name)
    if dtype == "bfloat16" and not gpu.has_bfloat16:
        raise UserError(f"--dtype bfloat16 is not supported by --gpu {name}: use --dtype float16")
    if calibration is None:
        return gpu
    found = Calibration.read(Path(calibration))
    if not gpu.is_named(found.gpu_name):
        fitting = [one.name for one in GPUS.values() if one.is_named(found.gpu_name)]
        raise UserError(
            f"--calibration {calibration} was measured on {found.gpu_name}, which is not a {gpu.name}: "
            + (f"give {fitting[0]} instead" if fitting else "give the file of such a GPU, or leave it out")
        )
    return gpu.calibrated(found, calibration)
