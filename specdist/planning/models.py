"""Models by name for a planner: their configuration alone, from a shape, a folder, or the hub."""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from specdist.models.checkpoint import Checkpoint, check_family
from specdist.models.sizes import ModelSize, model_size
from specdist.synthetic.shapes import SHAPES
from specdist.utils.errors import UserError

# A shape is not a checkpoint, and limits no context.
ANY_LENGTH = 2**20


def open_model(
    option: str, name: str, dtype: str, *, trust_remote_code: bool = False
) -> tuple[ModelSize, str]:
    """The sizes of a model, and the type of its numbers. Raises :class:`UserError` where it cannot be had,
    or is of a family that the engine does not run."""
    if name in SHAPES:
        shape = SHAPES[name]
        config = shape.llama_config(num_layers=shape.num_layers, dtype=torch.bfloat16)
        config.max_position_embeddings = ANY_LENGTH
    else:
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, StrictDataclassError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"{option} {name} has no readable configuration ({reason}): name a folder with a "
                f"config.json, a hub model that you can access, or a shape ({', '.join(SHAPES)})"
            ) from error
    model = Checkpoint(
        option=option,
        name=name,
        folder=Path(name),
        config=config,
        weight_files=(),
        trusts_code=trust_remote_code,
    )
    check_family(model, 1)
    torch_dtype = model.torch_dtype(dtype)
    return model_size(name, config, torch_dtype.itemsize, trusts_code=trust_remote_code), str(
        torch_dtype
    ).removeprefix("torch.")
