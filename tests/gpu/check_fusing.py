"""The checks of test_fusing.py; each runs in a process with a fake device."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from specdist.models.attention.kernel import TritonKernel, VarlenKernel
from specdist.models.batch.flat import FlatBatch
from specdist.models.loading.conversions import Piece
from specdist.models.loading.packed_experts import fill_quantized
from specdist.models.passes.acceleration import Acceleration
from specdist.models.quantized.quantized_linear import QuantizedLinear, choose_products
from specdist.models.quantized.quantized_weights import LayerFormat
from specdist.models.sizes.reserve import KERNELS_PER_LAYER, OTHER_KERNELS
from tests.engine.harness import paged_runner
from tests.gpu.device import DEVICE, Counts
from tests.gpu.engine_runs import GPU
from tests.models.families import tiny_model

# Of pages of 16 tokens the project's kernel runs, of 256 torch's FlashAttention, with a kernel more.
PAGE_SIZES = (16, 256)
FEW_LAYERS, MORE_LAYERS = 2, 4


def counts_of_pass(family: str, num_layers: int, page_size: int, *, is_fused: bool) -> Counts:
    """A pass that is not recorded, of five tokens."""
    model = tiny_model(family, num_hidden_layers=num_layers).bfloat16()
    acceleration = Acceleration(kernels=(VarlenKernel(), TritonKernel()), is_fused=is_fused)
    runner = paged_runner(model, acceleration, device=GPU)
    runner.allocate(num_pages=4, page_size=page_size, num_slots=1, max_seq_len=256)
    DEVICE.reset()
    runner.forward(FlatBatch(np.arange(5), np.zeros(5, np.int64), np.arange(5)), [4])
    return DEVICE.counts()


def kernels_of_family(family: str, page_size: int, *, is_fused: bool) -> tuple[int, int]:
    """Kernels of a layer, and of a pass besides its layers."""
    few, more = (
        counts_of_pass(family, number, page_size, is_fused=is_fused).num_kernels
        for number in (FEW_LAYERS, MORE_LAYERS)
    )
    per_layer, rest = divmod(more - few, MORE_LAYERS - FEW_LAYERS)
    assert rest == 0
    return per_layer, few - FEW_LAYERS * per_layer


def check_kernels(family: str, most: int) -> None:
    """Before and after, with both kinds of attention."""
    for page_size in PAGE_SIZES:
        before, _ = kernels_of_family(family, page_size, is_fused=False)
        after, others = kernels_of_family(family, page_size, is_fused=True)
        found = {"page size": page_size, "before": before, "after": after, "others": others}
        assert after <= most < before, found
        if family == "llama":
            assert after <= KERNELS_PER_LAYER and others <= OTHER_KERNELS, found


def check_rounding() -> None:
    """Of an input that three layers read, before and after, and the numbers are the same."""
    for numbers, most in (("float8", 6), ("int8", 7)):
        form = LayerFormat(numbers=numbers, rows=1, columns=None, activations="token")
        layers = nn.ModuleList(QuantizedLinear(form, 32, 48).to_empty(device=GPU) for _ in range(3))
        weight = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
        for layer in layers:
            fill_quantized(layer, Piece.whole("", weight.shape), weight)
        choose_products(layers, torch.bfloat16)
        assert layers[0].last_input.has_kernel
        inputs, rounded, counts = torch.randn(5, 48).bfloat16().to(GPU), [], []
        for has_kernel in (False, True):
            layers[0].last_input.has_kernel = has_kernel
            own = inputs.clone()
            DEVICE.reset()
            rounded.append([layer._rounded(own, own) for layer in layers])
            counts.append(DEVICE.counts().num_kernels)
        assert counts == [most, 1], (numbers, counts)
        assert torch.equal(rounded[0][2].numbers.float().cpu(), rounded[1][2].numbers.float().cpu())
