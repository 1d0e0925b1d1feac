"""Opens, checks and loads the MTP head of a target's checkpoint, from the target's own files."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from transformers import PreTrainedModel

from specdist.models.draft_models.declaration import Placement
from specdist.models.draft_models.mtp import FORMS, FileNames, mtp_config
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.files.damage import reading
from specdist.models.files.weight_files import stored_shapes
from specdist.models.loading.fitting import check_weights
from specdist.models.loading.loading import load_whole
from specdist.utils.errors import UserError

logger = logging.getLogger(__name__)

REMEDY = "name a draft model with --draft, or ngram"


def head_config(config: Any, draft: str, target: str) -> Any:
    """The configuration of the head of a target with this one. Raises :class:`UserError` for a family whose
    heads are not read."""
    family = config.get_text_config().model_type
    if family not in FORMS:
        raise UserError(
            f"--draft {draft}: --target {target} is of the family {family}, and specdist reads multi-token "
            f"prediction heads of these alone: {', '.join(FORMS)}; {REMEDY}"
        )
    return mtp_config(config)


def open_mtp(target: Checkpoint, draft: str) -> Checkpoint:
    """The target's files as those of a draft. Raises :class:`UserError` for a family whose heads are not
    read, and for files without any."""
    config = head_config(target.config, draft, target.name)
    what = f"--draft {draft}: --target {target.name}"
    if target.adapter is not None:
        raise UserError(
            f"{what} is merged with --target_adapter, which its head was not trained with: {REMEDY}"
        )
    names = FileNames(config)
    with reading(f"--target {target.name}: its weight files"):
        stored = stored_shapes(target.weight_files)
    if not any(map(names.is_of_module, stored)):
        raise UserError(f"{what} holds no multi-token prediction head in its files: {REMEDY}")
    if (num_modules := names.num_modules(stored)) > 1:
        logger.info("%s has %d modules in its files: the first one drafts all tokens", what, num_modules)
    config.mtp_projection_is_quantized = names.has_scales(stored)
    return dataclasses.replace(target, option="--draft", name=draft, config=config)


def check_mtp(draft: Checkpoint, target: Checkpoint) -> None:
    """Compare the head's layer with the headers of the files. Raises :class:`UserError`."""
    del target
    check_weights(draft, 1)


def load_mtp(draft: Checkpoint, target: Checkpoint, placement: Placement) -> PreTrainedModel:
    """The head, with the embedding and the output head of the model: where it is beside it, the same ones."""
    del target
    beside, on_tensor = placement.beside, placement.on_tensor
    model = load_whole(draft, dtype=placement.dtype, device=placement.device, on_tensor=on_tensor)
    for part in ("input_embeddings", "output_embeddings") if beside is not None else ():
        own, theirs = (getattr(each, f"get_{part}")() for each in (model, beside))
        # Not an output head of which a rank has a part.
        if type(own) is type(theirs) and (own.weight.shape, own.weight.dtype) == (
            theirs.weight.shape,
            theirs.weight.dtype,
        ):
            getattr(model, f"set_{part}")(theirs)
    return model
