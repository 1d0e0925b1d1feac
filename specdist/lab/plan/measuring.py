"""This machine's device as a row of the table of GPUs: measured where kernels can measure it."""

from __future__ import annotations

import statistics

import torch
from torch import nn

from specdist.engine.times.timeline import timed
from specdist.lab.plan.model.hardware import GB, HERE, PCIE_LATENCY_S, Gpu
from specdist.models.cpu.linear import OneDnnLinears
from specdist.utils.host import available_memory_bytes

# Larger than any cache, so that every product reads its matrix from memory.
MATRIX_BYTES = {"cpu": 2**27, "cuda": 2**31}
WIDTH = 4096
NUM_PRODUCT_TOKENS = {"cpu": 256, "cuda": 4096}
NUM_WARMUPS, NUM_PASSES = 2, 7
# Links are not measured: PCIe 4 × 16 is assumed.
LINK_BYTES_PER_S = 32 * GB


@torch.inference_mode()
def measure_here(device: torch.device, dtype: torch.dtype) -> Gpu:
    """Time the product of a large matrix with one token, which reads it, and with many, which multiplies.

    The rates are those of kernels, so their efficiency is 1. On a host they are those of float32 with the
    engine's library.
    """
    height = MATRIX_BYTES[device.type] // (WIDTH * dtype.itemsize)
    layer = nn.Linear(WIDTH, height, bias=False, device=device, dtype=dtype)
    nn.init.constant_(layer.weight, 1e-3)
    linears = OneDnnLinears(layer)
    num_tokens = NUM_PRODUCT_TOKENS[device.type]
    with linears.active():
        one_s, many_s = (_median_s(layer, count, device, dtype) for count in (1, num_tokens))
    flops_per_s = 2 * WIDTH * height * num_tokens / many_s
    return Gpu(
        name=HERE,
        memory_bytes=_memory_bytes(device),
        bandwidth_bytes_per_s=WIDTH * height * dtype.itemsize / one_s,
        half_flops_per_s=flops_per_s,
        float_flops_per_s=flops_per_s,
        link_bytes_per_s=LINK_BYTES_PER_S,
        link_latency_s=PCIE_LATENCY_S,
        bandwidth_efficiency=1.0,
        arithmetic_efficiency=1.0,
        reserved_bytes=0,
        is_host=device.type == "cpu",
        figures="memory and products measured on this machine; launches, waits and links assumed",
    )


def _median_s(layer: nn.Module, num_tokens: int, device: torch.device, dtype: torch.dtype) -> float:
    tokens = torch.ones(num_tokens, WIDTH, device=device, dtype=dtype)
    seconds = [timed(device, lambda: layer(tokens))[0] for _ in range(NUM_WARMUPS + NUM_PASSES)]
    return statistics.median(seconds[NUM_WARMUPS:])


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory_bytes()
