"""Whether a checkpoint's configuration and weight files are of one model, seen before weights are read."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from specdist.errors import UserError
from specdist.models.checkpoint import Checkpoint
from specdist.models.damage import reading
from specdist.models.loading import WeightNames
from specdist.models.weight_files import open_weights


def check_weights(checkpoint: Checkpoint) -> None:
    """Compare the shapes that the configuration asks for with those in the files, which takes their headers.

    Raises :class:`UserError` for a configuration of which no model can be built, or one of other shapes. What
    the files lack is found when they are read: some families store parameters that are split or joined then.
    """
    what = f"{checkpoint.option} {checkpoint.name}"
    shapes: dict[str, tuple[int, ...]] = {}
    with reading(f"{what}: its weight files"):
        for path in checkpoint.weight_files:
            with open_weights(path) as file:
                shapes |= {name: file.shape(name) for name in file.names}
    num_layers = checkpoint.config.get_text_config().num_hidden_layers
    # Every layer has a tensor of its own at least; a damaged number would build layers for hours.
    if not isinstance(num_layers, int) or not 0 < num_layers <= len(shapes):
        raise UserError(
            f"{what}: config.json names {num_layers} layers, but the files hold {len(shapes)} tensors: fetch "
            "both again"
        )
    with reading(f"{what}: config.json"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(checkpoint.config, trust_remote_code=checkpoint.trusts_code)
    names = WeightNames(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for stored, shape in shapes.items():
        for name in sorted(names.parameters_of(stored) & set(parameters)):
            if parameters[name].shape != shape:
                raise UserError(
                    f"{what}: {stored} is of shape {list(shape)} in the files, but config.json asks for "
                    f"{list(parameters[name].shape)}: fetch both again"
                )
