"""Checks before any weight is read that a checkpoint's configuration and weight files fit together."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

from specdist.models.families.dry_run import check_attention
from specdist.models.files.checkpoint import Checkpoint, build_model
from specdist.models.files.damage import reading
from specdist.models.files.weight_files import open_weights
from specdist.models.loading.conversions import conversions_of
from specdist.models.loading.quantized_experts import QuantizedExperts
from specdist.models.loading.quantized_loading import PLAIN_KINDS, check_parts
from specdist.models.loading.weight_names import WeightNames
from specdist.models.quantized.quantized import (
    CONFIG_KEY,
    UNQUANTISED,
    looks_quantised,
    plain_config,
    quantization_of,
)
from specdist.utils.errors import UserError

NUM_SHOWN = 3


def check_weights(checkpoint: Checkpoint, tp_size: int) -> None:
    """Compare the model of the configuration with the headers of the weight files.

    Raises :class:`UserError` for a configuration from which no model, or one of other shapes, can be built,
    and for tensors that would be ignored or misread: quantised weights, and tensors that nothing in the model
    takes. Missing tensors are found when the files are read, but those of parameters that are stored split or
    joined are found here.
    """
    what = f"{checkpoint.option} {checkpoint.name}"
    quantization = quantization_of(checkpoint)
    shapes: dict[str, tuple[int, ...]] = {}
    kinds: dict[str, str] = {}
    with reading(f"{what}: its weight files"):
        for path in checkpoint.weight_files:
            with open_weights(path) as file:
                shapes |= {name: file.shape(name) for name in file.names}
                kinds |= {name: file.kind(name) for name in file.names}
    num_layers = checkpoint.config.get_text_config().num_hidden_layers
    # Every layer has at least one tensor; with a damaged number, building layers could take hours.
    if not isinstance(num_layers, int) or not 0 < num_layers <= len(shapes):
        raise UserError(
            f"{what}: config.json names {num_layers} layers, but the files hold {len(shapes)} tensors: fetch "
            "both again"
        )
    with reading(f"{what}: config.json"), torch.device("meta"):
        model = build_model(copy.deepcopy(plain_config(checkpoint)), trusts_code=checkpoint.trusts_code)
    check_attention(model, what)
    names = WeightNames(model)
    experts = QuantizedExperts(names, quantization, shapes)
    experts.check(checkpoint, kinds)
    takers = names.takers(experts.shapes)
    converted = conversions_of(checkpoint, model, names, experts.shapes).stored_names
    if converted and checkpoint.quantization is not None:
        raise UserError(
            f"{what} stores tensors ({_shown(sorted(converted))}) that {type(model).__name__} has split or "
            "joined, as those of single experts; such models are not quantised here: leave "
            f"{checkpoint.quantizing_option} out"
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weights = {stored for stored, taken in takers.items() if taken & set(parameters)}
    read_along = check_parts(
        checkpoint, model, shapes, kinds, tp_size, has_experts=bool(experts.places)
    ) | set(experts.places)
    for stored in sorted(weights - read_along | weights & experts.formats.keys()):
        if stored not in experts.formats and kinds[stored] not in PLAIN_KINDS:
            raise UserError(
                f"{what}: {stored} is stored as {kinds[stored]}, and neither config.json nor another file "
                f"declares how it was quantised ({CONFIG_KEY}); its numbers alone are not the weight: "
                f"{UNQUANTISED}"
            )
        for name in sorted(takers[stored] & set(parameters)):
            if stored not in converted and parameters[name].shape != experts.shapes[stored]:
                raise UserError(
                    f"{what}: {stored} is of shape {list(experts.shapes[stored])} in the files, but "
                    f"config.json asks for {list(parameters[name].shape)}: fetch both again"
                )
    _refuse_leftovers(checkpoint, model, names, takers, read_along)


def _refuse_leftovers(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    names: WeightNames,
    takers: dict[str, set[str]],
    read_along: set[str],
) -> None:
    what = f"{checkpoint.option} {checkpoint.name}"
    left = sorted(
        name
        for name, taken in takers.items()
        if not taken and name not in read_along and not names.is_harmless(name)
    )
    quantised = [name for name in left if looks_quantised(name)]
    if quantised:
        raise UserError(
            f"{what}: {_shown(quantised)} looks like a part of quantised weights, and no file declares how "
            f"to read it; without it the weights would be wrong: {UNQUANTISED}"
        )
    if left:
        raise UserError(
            f"{what}: nothing in {type(model).__name__} takes {_shown(left)}: config.json is of another "
            "model than the weights, or they were changed; fetch both again, or remove these tensors if they "
            "are known to be of no use"
        )


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
    return ", ".join(names[:NUM_SHOWN]) + more
