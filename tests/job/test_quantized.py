"""Quantised checkpoints, and tensors that nothing in a model takes: read rightly, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdist.job.models.model_plan import plan_models
from specdist.utils.errors import UserError
from tests.job.launching import parse
from tests.job.pair import Pair, random_llama, save, train_tokenizer

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
BLOCK = 32
BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
Tensors = dict[str, Tensor]


@pytest.fixture
def folder(pair: Pair, tmp_path: Path) -> Path:
    """A copy of the target in one file, to be changed."""
    return save(tmp_path / "model", random_llama(), train_tokenizer())


def rewrite(folder: Path, change: Callable[[Tensors], Tensors], declared: dict[str, Any] | None) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if declared is not None:
        config["quantization_config"] = declared
    (folder / "config.json").write_text(json.dumps(config))


def is_projection(name: str) -> bool:
    return name.endswith("_proj.weight")


def in_blocks(tensors: Tensors) -> Tensors:
    """Every projection in FP8 with a scale for each block, as DeepSeek's models are stored."""
    found = dict(tensors)
    for name in filter(is_projection, tensors):
        rows, columns = tensors[name].shape
        blocks = tensors[name].reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / LARGEST_FP8
        found[name] = (blocks / scales).reshape(rows, columns).to(FP8)
        found[f"{name}_scale_inv"] = scales[:, 0, :, 0].clone()
    return found


def in_channels(tensors: Tensors) -> Tensors:
    """Every projection in FP8 with a scale for each row, as compressed-tensors stores it."""
    found = dict(tensors)
    for name in filter(is_projection, tensors):
        scales = tensors[name].abs().amax(dim=1, keepdim=True) / LARGEST_FP8
        found |= {name: (tensors[name] / scales).to(FP8), f"{name}_scale": scales}
    return found


def of_channels(**changes: Any) -> dict[str, Any]:
    """The declaration of :func:`in_channels`, changed."""
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights}
    declared = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    return declared | {"config_groups": {"group_0": group}} | changes


def of_group(*, weights: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    declared = of_channels()
    group = declared["config_groups"]["group_0"]
    group["weights"] |= weights or {}
    group |= changes
    return declared


def in_blocks_of(size: int) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        found = dict(tensors)
        for name in filter(is_projection, tensors):
            rows, columns = (-(-width // size) for width in tensors[name].shape)
            found |= {name: tensors[name].to(FP8), f"{name}_scale_inv": torch.ones(rows, columns)}
        return found

    return change


def without(suffix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        name: tensor for name, tensor in in_blocks(tensors).items() if not name.endswith(suffix)
    }


def with_extra(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: torch.ones(4)}


@pytest.mark.parametrize(
    ("change", "declared", "tp_size", "fragments"),
    [
        (in_blocks, None, 1, ["is stored as F8_E4M3", "quantization_config", "unquantised checkpoint"]),
        (without("_scale_inv"), BLOCK_FP8, 1, ["files hold no", "_proj.weight_scale_inv", "fetch it again"]),
        (in_channels, {"quant_method": "compressed-tensors"}, 1, ["compressed-tensors", "config_groups"]),
        (in_channels, of_channels(format="marlin-24"), 1, ["8-bit float weights in format marlin-24"]),
        (in_channels, of_group(weights={"actorder": "group"}), 1, ["group_0 has weights with actorder"]),
        (
            in_channels,
            of_group(input_activations={"strategy": "tensor", "dynamic": True, "type": "float"}),
            1,
            ["whose scale depends on the other tokens of a pass"],
        ),
        (in_channels, of_group(weights={"strategy": "tensor"}), 1, ["is of shape", "one scale"]),
        (in_blocks_of(64), BLOCK_FP8 | {"weight_block_size": [64, 64]}, 2, ["--tp_size 2 cuts", "64 share"]),
        (dict, {"quant_method": "awq", "bits": 4}, 1, ["declares awq", "unquantised checkpoint"]),
        (with_extra("model.layers.0.mlp.up_proj.weight_scale"), None, 1, ["weight_scale", "looks like"]),
        (with_extra("model.layers.0.mlp.up_proj.bias"), None, 1, ["takes model.layers.0.mlp.up_proj.bias"]),
    ],
)  # fmt: skip
def test_what_would_be_misread_is_refused_by_name(
    options: dict[str, Any],
    folder: Path,
    change: Callable[[Tensors], Tensors],
    declared: dict[str, Any] | None,
    tp_size: int,
    fragments: list[str],
) -> None:
    rewrite(folder, change, declared)
    config = parse(**(options | {"target": folder, "draft": None}), tp_size=tp_size, output="unused")
    with pytest.raises(UserError) as error:
        plan_models(config)
    for fragment in [f"--target {folder}", *fragments]:
        assert fragment in str(error.value)


@pytest.mark.parametrize(
    ("file_name", "declared", "method"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "quant_method": "gptq"}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True}, "unnamed"),
    ],
)
def test_a_scheme_that_another_file_declares_is_refused(
    options: dict[str, Any], folder: Path, file_name: str, declared: dict[str, Any], method: str
) -> None:
    (folder / file_name).write_text(json.dumps(declared))
    config = parse(**(options | {"target": folder, "draft": None}), output="unused")
    with pytest.raises(UserError, match=rf"{file_name} declares {method}"):
        plan_models(config)
