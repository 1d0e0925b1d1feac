"""Opens PEFT folders of LoRA adapters (``--target_adapter``, ``--draft_adapter``), and refuses by name what
they say that cannot be merged, before any weight of the model is read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from specdist.models.families.computed import build_without_weights
from specdist.models.files.checkpoint import ADAPTER_CONFIG_NAME, Checkpoint, from_hub
from specdist.models.files.damage import reading
from specdist.models.files.lora import LoraAdapter, LowRank
from specdist.models.files.weight_files import PLAIN_KINDS, open_weights
from specdist.models.loading.weight_names import WeightNames, parameters_of_vocabulary, ties_embeddings
from specdist.models.quantized.quantized import UNQUANTISED, declared_scheme
from specdist.utils.errors import UserError
from specdist.utils.json_values import parse_object

WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX, BASE_LAYER = "base_model.model.", ".base_layer"
# The ends of stored names, each with its role.
ROLES = {
    ".lora_A.weight": "A", ".lora_B.weight": "B",
    ".lora_embedding_A": "A", ".lora_embedding_B": "B",
}  # fmt: skip
# The keys that are read here, those that say what the file holds anyway, and those of its training alone.
READ_KEYS = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
             "init_lora_weights"}  # fmt: skip
OTHER_KEYS = {
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type", "velora_config",
}  # fmt: skip
# Others (PiSSA, OLoRA, LoftQ, ...) change the model's own weights before they train the adapter.
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
NUM_SHOWN = 3
MERGE = (
    "merge it into its model with PEFT (merge_and_unload), save that with save_pretrained, and name that "
    "folder as the model"
)


@dataclass(frozen=True)
class _Stored:
    """A tensor of the file: the module or parameter in the model that it is for, and what it is of that."""

    name: str
    role: str | None
    of: str
    shape: tuple[int, ...]


def open_adapter(option: str, name: str, checkpoint: Checkpoint) -> LoraAdapter:
    """Find the adapter's files, from the hub if need be, and compare them with the model. Raises
    :class:`UserError` for whatever cannot be merged into it.

    The tensors say which modules are adapted: ``target_modules`` and the like are not read.
    """
    what = f"{option} {name}"
    scheme = declared_scheme(checkpoint)
    if scheme is not None:
        raise UserError(
            f"{what} cannot be merged into {checkpoint.option} {checkpoint.name}, which is quantised "
            f"({scheme.file_name} declares {scheme.method}): {UNQUANTISED}; {checkpoint.option}_quantization "
            "quantises it with the adapter"
        )
    folder = Path(name)
    if not folder.is_dir():
        folder = from_hub(option, name, [ADAPTER_CONFIG_NAME, WEIGHTS_NAME])
    for path in (folder / ADAPTER_CONFIG_NAME, folder / WEIGHTS_NAME):
        if not path.is_file():
            raise UserError(
                f"{what} has no {path.name}: name a folder that PEFT's save_pretrained has written"
            )
    with reading(f"{what}: {ADAPTER_CONFIG_NAME}"):
        config = parse_object((folder / ADAPTER_CONFIG_NAME).read_bytes())
    _check_config(what, config)
    stored = _stored_tensors(what, folder / WEIGHTS_NAME)
    with reading(f"{what}: {ADAPTER_CONFIG_NAME}"):
        scales = {each.of: _scale(config, each) for each in stored if each.role == "A"}
    updates, replaced = _fitted(what, checkpoint, stored, scales)
    return LoraAdapter(
        name=name,
        folder=folder,
        files=(folder / ADAPTER_CONFIG_NAME, folder / WEIGHTS_NAME),
        updates=updates,
        replaced=replaced,
    )


def _check_config(what: str, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UserError(f"{what} is a PEFT adapter of type {kind}, and only LORA is merged here: {MERGE}")
    start = config.get("init_lora_weights")
    changed = {key: value for key, value in config.items() if value and key not in READ_KEYS | OTHER_KEYS}
    if start not in PLAIN_STARTS:
        changed["init_lora_weights"] = start
    if changed:
        key, value = next(iter(changed.items()))
        why = (
            "which changed the model's own weights, too: save it with PEFT's "
            "path_initial_model_for_weight_conversion, or"
            if key == "init_lora_weights"
            else "which is not merged here:"
        )
        raise UserError(f"{what} has {key} {value!r} in {ADAPTER_CONFIG_NAME}, {why} {MERGE}")


def _stored_tensors(what: str, path: Path) -> list[_Stored]:
    found = []
    with reading(f"{what}: {path.name}"), open_weights(path) as file:
        for name in file.names:
            if file.kind(name) not in PLAIN_KINDS:
                raise UserError(
                    f"{what}: {name} is stored as {file.kind(name)}: save the adapter in plain numbers"
                )
            ending = next((each for each in ROLES if name.endswith(each)), "")
            of = name.removeprefix(PREFIX).removesuffix(ending).replace(f"{BASE_LAYER}.", ".")
            found.append(_Stored(name, ROLES.get(ending), of, file.shape(name)))
    if not found:
        raise UserError(f"{what}: {path.name} holds no tensors: save the adapter again")
    return found


def _scale(config: Mapping[str, Any], stored: _Stored) -> float:
    """PEFT's: patterns are matched against the ends of a module's name, the first that matches counts."""

    def of_module(patterns: str, default: str) -> float:
        for pattern, value in (config.get(patterns) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", stored.of):
                return float(value)
        return float(config[default])

    rank = of_module("rank_pattern", "r")
    if rank != stored.shape[0]:
        raise ValueError(f"it says r = {rank:g} of {stored.of}, whose tensor has {stored.shape[0]}")
    return of_module("alpha_pattern", "lora_alpha") / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _fitted(
    what: str,
    checkpoint: Checkpoint,
    stored: list[_Stored],
    scales: Mapping[str, float],
) -> tuple[dict[str, LowRank], dict[str, str]]:
    """The updates and the replaced parameters by their names in the model."""
    model = build_without_weights(checkpoint, checkpoint.torch_dtype("auto"))
    names = {each.name: each.of if each.role is None else f"{each.of}.weight" for each in stored}
    weight_names = WeightNames(model)
    takers = weight_names.takers(set(names.values()))
    vocabulary = parameters_of_vocabulary(model)
    tied = vocabulary if ties_embeddings(model) else set()
    modules: dict[str, dict[str, _Stored]] = {}
    replaced: dict[str, str] = {}
    left = []
    for each in stored:
        parameters = takers[names[each.name]]
        if parameters & tied:
            raise UserError(
                f"{what} changes {each.of}, and {checkpoint.option} {checkpoint.name} has the same weights "
                f"for its embedding and its output head (tie_word_embeddings): {MERGE}"
            )
        if not parameters:
            left.append(each.name)
            continue
        if weight_names.renamed(names[each.name])[1] is not None:
            raise UserError(
                f"{what} changes {each.of}, which {type(model).__name__} has split or joined, as those of "
                f"single experts: {MERGE}"
            )
        (parameter,) = parameters
        if each.role is not None:
            modules.setdefault(parameter, {})[each.role] = each
        else:
            shape = tuple(model.state_dict()[parameter].shape)
            if parameter in vocabulary and each.shape[1:] == shape[1:] and each.shape != shape:
                raise UserError(
                    f"{what} was trained with a vocabulary of {each.shape[0]} tokens ({each.name}), and "
                    f"{checkpoint.option} {checkpoint.name} has {shape[0]}: call resize_token_embeddings("
                    f"{each.shape[0]}) on the model, merge the adapter into it with PEFT (merge_and_unload), "
                    "save that with save_pretrained and with the adapter's tokenizer, and name that folder "
                    "as the model"
                )
            _check_shape(what, checkpoint, each, shape)
            replaced[parameter] = each.name
    if left:
        more = f" and {len(left) - NUM_SHOWN} more" if len(left) > NUM_SHOWN else ""
        raise UserError(
            f"{what}: nothing in {type(model).__name__} takes {', '.join(left[:NUM_SHOWN])}{more}: it was "
            f"trained for another model than {checkpoint.option} {checkpoint.name}, or needs more than LoRA"
        )
    updates = {}
    for parameter, parts in modules.items():
        module = model.get_submodule(parameter.rpartition(".")[0])
        # As its matrix would be as [outputs, inputs].
        is_transposed = isinstance(module, nn.Embedding | Conv1D)
        shape = tuple(module.weight.shape)[:: -1 if is_transposed else 1]
        if parts.keys() != {"A", "B"}:
            raise UserError(
                f"{what}: of {parameter} it holds {', '.join(sorted(parts))}, and LoRA has A and B: save the "
                "adapter again"
            )
        rank = parts["A"].shape[0]
        _check_shape(what, checkpoint, parts["A"], (rank, shape[1]))
        _check_shape(what, checkpoint, parts["B"], (shape[0], rank))
        updates[parameter] = LowRank(
            a=parts["A"].name,
            b=parts["B"].name,
            scale=scales[parts["A"].of],
            is_transposed=is_transposed,
        )
    return updates, replaced


def _check_shape(what: str, checkpoint: Checkpoint, stored: _Stored, expected: tuple[int, ...]) -> None:
    if stored.shape != expected:
        raise UserError(
            f"{what}: {stored.name} is of shape {list(stored.shape)}, but {checkpoint.option} "
            f"{checkpoint.name} asks for {list(expected)}: it was trained for another model"
        )
