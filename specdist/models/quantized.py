"""Quantised checkpoints: which are read, and which are refused by name before anything is loaded.

A quantised weight is a matrix of narrow numbers with scales. Read without its scales it is another matrix,
and the model still answers. One scheme is supported, in one process: transformers' block-wise FP8
(``quant_method: fp8``, as in DeepSeek's models). transformers multiplies its weights with their scales during
loading, and passes run in ``--dtype``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from specdist.models.checkpoint import Checkpoint
from specdist.models.damage import reading
from specdist.utils.errors import UserError
from specdist.utils.json_values import parse_object

CONFIG_KEY = "quantization_config"
# Where other tools declare their quantisation: AutoGPTQ, AutoAWQ, NVIDIA's ModelOpt.
SCHEME_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
BLOCK_FP8 = "fp8"
FP8_KINDS = {"F8_E4M3", "F8_E5M2"}
PLAIN_KINDS = {"F64", "F32", "F16", "BF16"}
# Stored with a weight of block-wise FP8: its scales, and those of activations, which are not quantised here.
WEIGHT_SCALES, ACTIVATION_SCALES = ("_scale_inv",), ("activation_scale", "input_scale")
QUANTISED_NAMES = ("scale", "zero_point", "zeros", "qweight", "g_idx", "absmax", "quant_state", "packed")
UNQUANTISED = "name the unquantised checkpoint that it was made from"


@dataclass(frozen=True)
class Scheme:
    """A declared quantisation: its method's name, and the file that declares it."""

    method: str
    file_name: str


def declared_scheme(checkpoint: Checkpoint) -> Scheme | None:
    """The quantisation that the folder declares, if any."""
    declared = _declared_config(checkpoint)
    if declared is not None:
        return Scheme(str(declared.get("quant_method", "unnamed")), "config.json")
    for name in SCHEME_FILES:
        path = checkpoint.folder / name
        if path.is_file():
            with reading(f"{checkpoint.option} {checkpoint.name}: {name}"):
                values = parse_object(path.read_bytes())
            nested = values.get("quantization")
            named = {**values, **(nested if isinstance(nested, dict) else {})}
            method = next((named[key] for key in ("quant_method", "quant_algo") if named.get(key)), None)
            if method is None and "bits" not in named and "w_bit" not in named:
                continue  # ModelOpt also writes its file for models that it has not quantised
            return Scheme(str(method or "unnamed"), name)
    return None


def check_scheme(checkpoint: Checkpoint, tp_size: int) -> None:
    """Raises :class:`UserError` for a declared quantisation that is not supported."""
    scheme = declared_scheme(checkpoint)
    if scheme is None:
        return
    what = (
        f"{checkpoint.option} {checkpoint.name} is quantised ({scheme.file_name} declares {scheme.method}), "
        "which specdist"
    )
    if scheme.method != BLOCK_FP8 or scheme.file_name != "config.json":
        raise UserError(f"{what} does not read: {UNQUANTISED}")
    if tp_size > 1:
        raise UserError(
            f"{what} reads in one process only: use --tp_size 1; or load it once with transformers and "
            "FineGrainedFP8Config(dequantize=True), save it with save_pretrained, and name that folder"
        )
    declared = _declared_config(checkpoint) or {}
    if declared.get("weight_block_size") is None or declared.get("expert_dtype", "fp8") != "fp8":
        raise UserError(f"{what} reads with weight_block_size and FP8 weights only: {UNQUANTISED}")


def check_stored_kinds(checkpoint: Checkpoint, kinds: Mapping[str, str], weights: set[str]) -> set[str]:
    """Raises :class:`UserError` for stored numbers that would be misread.

    Args:
        kinds: kind of number of each stored tensor, as a safetensors header names it.
        weights: the tensors that floating-point parameters take.

    Returns:
        The tensors that belong to quantised weights and are read with them.
    """
    what = f"{checkpoint.option} {checkpoint.name}"
    scheme = declared_scheme(checkpoint)
    read_along: set[str] = set()
    for name in sorted(weights):
        if kinds[name] in PLAIN_KINDS:
            continue
        scales = [name + suffix for suffix in WEIGHT_SCALES if name + suffix in kinds]
        if scheme is None:
            raise UserError(
                f"{what}: {name} is stored as {kinds[name]}, and neither config.json nor another file "
                f"declares how it was quantised ({CONFIG_KEY}); its numbers alone are not the weight: "
                f"{UNQUANTISED}"
            )
        if kinds[name] not in FP8_KINDS or not scales:
            raise UserError(
                f"{what}: {name} is stored as {kinds[name]} without {name}{WEIGHT_SCALES[0]}, which "
                f"{scheme.method} needs: fetch it again, or {UNQUANTISED}"
            )
        module = name.removesuffix("weight")
        read_along |= {*scales, *(module + suffix for suffix in ACTIVATION_SCALES)}
    return read_along


def looks_quantised(stored_name: str) -> bool:
    """Whether the last part of a tensor's name is typical of quantised checkpoints."""
    leaf = stored_name.rpartition(".")[2]
    return any(word in leaf for word in QUANTISED_NAMES)


def dequantized_config(checkpoint: Checkpoint) -> Any:
    """The configuration with which transformers multiplies quantised weights with their scales during
    loading, even if the device has kernels for quantised ones."""
    if _declared_config(checkpoint) is None:
        return checkpoint.config
    config = copy.deepcopy(checkpoint.config)
    config.quantization_config = {**(_declared_config(checkpoint) or {}), "dequantize": True}
    return config


@torch.no_grad()
def cast_dequantized(model: PreTrainedModel, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Cast all parameters of a quantised checkpoint to the run's dtype: transformers leaves unquantised ones
    as they are stored. Buffers keep their dtype."""
    if _declared_config(checkpoint) is not None:
        for weight in model.parameters():
            weight.data = weight.data.to(dtype)


def _declared_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    for config in (checkpoint.config, checkpoint.config.get_text_config()):
        declared = getattr(config, CONFIG_KEY, None)
        if declared:
            return declared if isinstance(declared, dict) else declared.to_dict()
    return None
