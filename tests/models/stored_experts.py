"""Random matrices of experts in every format, with the numbers that they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from specdist.models.loading.conversions import Piece
from specdist.models.loading.packed_experts import fill_quantized, packed_experts_of, place_experts
from specdist.models.quantized.quantized_weights import LayerFormat, QuantizedWeight, from_stored, quantize
from specdist.models.sharding.experts import experts_of
from tests.models.quantized_checkpoints import words

generator = torch.Generator()


@dataclass(frozen=True)
class Stored:
    """A random matrix: as it is read, and the numbers that it means, computed here."""

    weight: QuantizedWeight
    plain: Tensor


def float8(num_outputs: int, num_inputs: int, rows: int | None, columns: int | None) -> Stored:
    form = LayerFormat(numbers="float8", rows=rows, columns=columns)
    numbers = torch.randn(num_outputs, num_inputs, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(form.num_scales(num_outputs, num_inputs), generator=generator) + 0.1
    spread = scales.repeat_interleave(rows or num_outputs, 0)[:num_outputs]
    spread = spread.repeat_interleave(columns or num_inputs, 1)[:, :num_inputs]
    parts = {"weight": numbers, "weight_scale": scales}
    return Stored(from_stored(form, parts, (num_outputs, num_inputs)), numbers.float() * spread)


def int4(num_outputs: int, num_inputs: int) -> Stored:
    form = LayerFormat(numbers="int4", rows=1, columns=8, is_packed=True, has_zeros=True)
    numbers = torch.randint(-8, 8, (num_outputs, num_inputs), generator=generator)
    scales = torch.rand(num_outputs, num_inputs // 8, generator=generator) + 0.1
    zeros = torch.randint(-8, 8, scales.shape, generator=generator)
    values = (numbers.unflatten(1, (-1, 8)) - zeros[..., None]) * scales[..., None]
    parts = {
        "weight_packed": words(numbers, 4),
        "weight_scale": scales,
        "weight_zero_point": words(zeros.T.contiguous(), 4).T.contiguous(),
    }
    return Stored(from_stored(form, parts, (num_outputs, num_inputs)), values.flatten(1))


def mxfp4(num_outputs: int, num_inputs: int) -> Stored:
    # 8 and not 32 numbers of a scale: the widths are small.
    form = LayerFormat(numbers="float4", rows=1, columns=8, has_powers=True)
    numbers = torch.randint(0, 256, (num_outputs, num_inputs // 2), generator=generator).to(torch.uint8)
    powers = torch.randint(124, 129, (num_outputs, num_inputs // 8), generator=generator).to(torch.uint8)
    blocks = numbers.reshape(1, num_outputs, -1, 4)
    plain = convert_moe_packed_tensors(blocks, powers[None], dtype=torch.float32)[0].T
    return Stored(QuantizedWeight(form, num_inputs, numbers, powers), plain)


FORMATS: dict[str, Callable[[int, int], Stored]] = {
    "FP8, blocks": lambda *shape: float8(*shape, 16, 16),
    "FP8, channels": lambda *shape: float8(*shape, 1, None),
    "FP8, one scale": lambda *shape: float8(*shape, None, None),
    "INT4, groups with zero points": int4,
    "MXFP4": mxfp4,
}


def make_packed(model: nn.Module) -> None:
    """Put INT8 in the place of a model's experts without biases."""
    form = LayerFormat(numbers="int8", rows=1, columns=None)
    weights = {
        f"{name}.{leaf}": weight.detach()
        for name, module in experts_of(model)
        for leaf, weight in module.named_parameters()
    }
    places = {
        name: [
            (name, Piece(name, (index, 0, 0), (1, *weight.shape[1:]), (("unsqueeze", (0,)),)))
            for index in range(len(weight))
        ]
        for name, weight in weights.items()
    }
    place_experts(model, "it", dict.fromkeys(weights, form), places, torch.bfloat16)
    for name, experts in packed_experts_of(model):
        experts.to_empty(device="cpu")
        for (_, piece), weight in zip(places[name], weights[name], strict=True):
            fill_quantized(experts, piece, quantize(form, weight))
