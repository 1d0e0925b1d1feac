"""Small checkpoints in the layouts in which quantised models are published, written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
# By their bits: a sign, two of an exponent, and one of a fraction.
HALF_FLOAT4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FLOAT4 = torch.cat([HALF_FLOAT4, -HALF_FLOAT4])
GROUP = 32
BLOCK = 32

# From a weight [N, K] to its stored parts.
Store = Callable[[Tensor], dict[str, Tensor]]


def is_projection(name: str) -> bool:
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight"))


def float8(weight: Tensor, scales: Tensor) -> Tensor:
    return (weight / scales).clamp(-448, 448).to(FP8)


def float8_tensor(weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().max() / 448
    return {
        "weight": float8(weight, scale),
        "weight_scale": scale.reshape(1),
        "input_scale": torch.ones(1) / 64,
    }


def float8_channel(weight: Tensor) -> dict[str, Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 448
    return {"weight": float8(weight, scales), "weight_scale": scales}


def float8_block(weight: Tensor, scale_name: str = "weight_scale_inv") -> dict[str, Tensor]:
    rows, columns = weight.shape
    blocks = weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    return {"weight": float8(blocks, scales).reshape(rows, columns), scale_name: scales[:, 0, :, 0].clone()}


def int8_channel(weight: Tensor) -> dict[str, Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales}


def words(numbers: Tensor, bits: int) -> Tensor:
    """[A, B] signed numbers as [A, B * bits / 32] words: the first in the lowest bits."""
    per_word = 32 // bits
    shifted = (numbers.to(torch.int64) + 2 ** (bits - 1)).reshape(len(numbers), -1, per_word)
    packed = (shifted << (bits * torch.arange(per_word))).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def packed(bits: int, *, is_symmetric: bool = True, columns: int | None = GROUP) -> Store:
    """compressed-tensors' ``pack-quantized``."""
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def store(weight: Tensor) -> dict[str, Tensor]:
        groups = weight.reshape(len(weight), -1, columns or weight.shape[1])
        low, high = groups.amin(-1), groups.amax(-1)
        zeros = torch.zeros_like(low)
        if is_symmetric:
            scales = torch.maximum(-low, high) / most
        else:
            scales = (high - low) / (most - least)
            zeros = (least - low / scales).round().clamp(least, most)
        numbers = (groups / scales[..., None] + zeros[..., None]).round().clamp(least, most)
        parts = {
            "weight_packed": words(numbers.reshape(weight.shape), bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            parts["weight_zero_point"] = words(zeros.t(), bits).t().contiguous()
        return parts

    return store


def float4(columns: int, global_name: str | None, name: str = "weight_packed") -> Store:
    """Of four bits: NVFP4, whose scales are float8 and share one, and MXFP4, whose scales are powers of 2."""

    def store(weight: Tensor) -> dict[str, Tensor]:
        groups = weight.reshape(len(weight), -1, columns)
        largest = groups.abs().amax(-1) / 6
        if global_name is None:
            exponents = largest.log2().ceil().clamp(-127, 127)
            parts, scales = {"weight_scale": (exponents + 127).to(torch.uint8)}, 2**exponents
        else:
            whole = largest.max() / 448
            stored = (largest / whole).to(FP8)
            is_divisor = global_name == "weight_global_scale"
            parts = {"weight_scale": stored, global_name: (1 / whole if is_divisor else whole).reshape(1)}
            parts["input_global_scale" if is_divisor else "input_scale"] = torch.ones(1)
            scales = stored.float() * whole
        nearest = (groups / scales[..., None])[..., None].sub(FLOAT4).abs().argmin(-1)
        codes = nearest.reshape(weight.shape).to(torch.uint8)
        return parts | {name: codes[:, 0::2] | codes[:, 1::2] << 4}

    return store


def compressed(
    kind: str, bits: int, form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The declaration of compressed-tensors."""
    common = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": common | weights,
                "input_activations": None if inputs is None else common | inputs,
                "output_activations": None,
                "format": form,
            }
        },
    }


PER_TOKEN = {"strategy": "token", "dynamic": True}
PER_GROUP = {"strategy": "group", "group_size": GROUP}
IN_BLOCKS = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
# By the names of the README's table: the declaration, and how a projection is stored.
LAYOUTS: dict[str, tuple[dict[str, Any], Store]] = {
    "FP8, one scale, static inputs": (
        compressed("float", 8, "float-quantized", {"strategy": "tensor"}, {"strategy": "tensor"}),
        float8_tensor,
    ),
    "FP8 per channel, inputs per token": (
        compressed("float", 8, "float-quantized", {"strategy": "channel"}, PER_TOKEN),
        float8_channel,
    ),
    "FP8 in blocks, inputs in groups": (
        compressed(
            "float", 8, "float-quantized",
            {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
            {"strategy": "group", "group_size": BLOCK, "dynamic": True},
        ),
        lambda weight: float8_block(weight, "weight_scale"),
    ),
    "FP8 in blocks (fp8)": (IN_BLOCKS, float8_block),
    "INT8 W8A8, inputs per token": (
        compressed("int", 8, "int-quantized", {"strategy": "channel"}, PER_TOKEN),
        int8_channel,
    ),
    "INT8 W8A16 per channel": (
        compressed("int", 8, "int-quantized", {"strategy": "channel"}),
        int8_channel,
    ),
    "INT8 W8A16 packed in groups": (compressed("int", 8, "pack-quantized", PER_GROUP), packed(8)),
    "INT4 W4A16 packed in groups": (compressed("int", 4, "pack-quantized", PER_GROUP), packed(4)),
    "INT4 W4A16 packed in groups, zero points": (
        compressed("int", 4, "pack-quantized", PER_GROUP | {"symmetric": False}),
        packed(4, is_symmetric=False),
    ),
    "NVFP4": (
        compressed(
            "float", 4, "nvfp4-pack-quantized",
            {"strategy": "tensor_group", "group_size": 16},
            {"strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
        ),
        float4(16, "weight_global_scale"),
    ),
    "MXFP4": (
        compressed("float", 4, "mxfp4-pack-quantized", {"strategy": "group", "group_size": 32}),
        float4(32, None),
    ),
}  # fmt: skip
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}


def write(folder: Path, declared: dict[str, Any], store: Store) -> None:
    """Quantise the projections of a saved model in place."""
    path = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        if is_projection(name):
            owner = name.removesuffix("weight")
            tensors |= {owner + part: stored.contiguous() for part, stored in store(tensor.float()).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))


def uneven(model: torch.nn.Module) -> None:
    """Rows and columns of projections of very different sizes, so that another's scale is noticed; and
    numbers that are not around zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if is_projection(name):
                rows = torch.rand(len(weight), 1, generator=generator) * 1.8 + 0.2
                columns = torch.rand(weight.shape[1], generator=generator) * 1.8 + 0.2
                weight.mul_(rows * columns).add_(0.3 * weight.std())
