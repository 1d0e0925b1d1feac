"""Opens, checks and loads drafters: those that have files of their own (an EAGLE-3 draft, or one that drafts
blocks), and the MTP head of a target's checkpoint, from the target's own files.

Embeddings that a drafter's files lack are the target's, and so is the output head of a draft that knows all
ids and takes that.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.draft_models.declaration import OwnFilesDrafter, Placement
from specdist.models.draft_models.mtp import FORMS, FileNames, mtp_config
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.files.damage import reading
from specdist.models.files.weight_files import PLAIN_KINDS, StoredTensors, open_weights, stored_shapes
from specdist.models.loading.loading import load_whole, refuse_missing
from specdist.models.loading.places import check_weights
from specdist.utils.errors import UserError

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# Some files name the vocabulary map and the layer as parts of the model.
PREFIX = "model."
MAP_KINDS = {"d2t": "I64", "t2d": "BOOL"}

REMEDY = "name a draft model with --draft, or ngram"

logger = logging.getLogger(__name__)


def check_own_files(draft: Checkpoint, target: Checkpoint) -> None:
    """Compare the draft with the target, and its configuration with the headers of its files.

    Raises :class:`UserError` for a draft of another target, another form, or with other tensors.
    """
    what, kind = f"{draft.option} {draft.name}", _kind(draft)
    if faults := kind.faults(draft.config, target.config):
        raise UserError(
            f"{what} is {kind.what} that cannot be used: config.json names {'; '.join(faults)}. Choose "
            "one that was trained for this target"
        )
    with reading(f"{what}: config.json"), torch.device("meta"):
        expected = kind.build(copy.deepcopy(draft.config)).state_dict()
    found: set[str] = set()
    with reading(f"{what}: its weight files"):
        for file, stored, name in _tensors(draft, kind):
            if name not in expected:
                raise UserError(
                    f"{what}: nothing in {kind.what} takes {stored}: it is of another form, "
                    "which is not read here; choose one in the published form"
                )
            if _without_ones(file.shape(stored)) != _without_ones(expected[name].shape):
                raise UserError(
                    f"{what}: {stored} is of shape {list(file.shape(stored))} in the files, but "
                    f"config.json asks for {list(expected[name].shape)}: fetch both again"
                )
            if name not in MAP_KINDS and file.kind(stored) not in PLAIN_KINDS:
                raise UserError(
                    f"{what}: {stored} is stored as {file.kind(stored)}, and {kind.what} is "
                    "read in plain numbers only: choose one that is not quantised"
                )
            found.add(name)
    missing = set(expected) - found
    refuse_missing(draft, missing - _spared(kind, expected))
    for name in (EMBEDDING, HEAD):
        if name in missing:
            _place(kind, target, name)


def load_own_files(draft: Checkpoint, target: Checkpoint, placement: Placement) -> PreTrainedModel:
    """The draft, which has all that it needs. Raises :class:`UserError` if files have changed since they were
    checked."""
    kind = _kind(draft)
    with torch.device("meta"):
        model: Any = kind.build(copy.deepcopy(draft.config))
    model = model.to(dtype=placement.dtype).to_empty(device=placement.device)
    # Its frequencies are not weights, and need float32.
    model.rotary_emb = type(model.rotary_emb)(model.config).to(placement.device)
    model.d2t.zero_()
    wanted = model.state_dict()
    missing = set(wanted)
    with torch.no_grad(), reading(f"{draft.option} {draft.name}: its weight files"):
        for file, stored, name in _tensors(draft, kind):
            wanted[name].copy_(file.read(stored).view_as(wanted[name]))
            missing.discard(name)
            placement.on_tensor()
        for name in (EMBEDDING, HEAD):
            if name in missing & _spared(kind, wanted):
                wanted[name].copy_(_of_target(kind, target, name))
    refuse_missing(draft, missing - _spared(kind, wanted))
    model.read_map()
    _check_map(draft, model)
    return model.eval()


def _kind(draft: Checkpoint) -> OwnFilesDrafter:
    assert isinstance(draft.drafter, OwnFilesDrafter)
    return draft.drafter


def _tensors(draft: Checkpoint, kind: OwnFilesDrafter) -> Iterator[tuple[StoredTensors, str, str]]:
    """What the drafter takes of its files: the open file, a tensor's name there, and that in the model."""
    for path in draft.weight_files:
        with open_weights(path) as file:
            for stored in file.names:
                name = stored.removeprefix(PREFIX)
                for theirs, own in kind.renamed:
                    name = own + name.removeprefix(theirs) if name.startswith(theirs) else name
                if not name.startswith(kind.unused_names):
                    yield file, stored, name


def _without_ones(shape: Iterable[int]) -> list[int]:
    """Some vectors are written as a row of a matrix, or of several."""
    return [size for size in shape if size != 1]


def _of_target(kind: OwnFilesDrafter, target: Checkpoint, name: str) -> Tensor:
    """[V, E]: read from the target's files. Raises :class:`UserError` if there is none."""
    path, stored = _place(kind, target, name)
    with reading(f"{target.option} {target.name}: {path}"), open_weights(target.folder / path) as file:
        return file.read(stored)


def _place(kind: OwnFilesDrafter, target: Checkpoint, name: str) -> tuple[str, str]:
    """File and name of the target's embeddings, or of its head, which may be the same."""
    found: dict[str, tuple[str, str]] = {}
    for path in target.weight_files:
        with reading(f"{target.option} {target.name}: {path.name}"), open_weights(path) as file:
            for stored in file.names:
                found |= {each: (path.name, stored) for each in (EMBEDDING, HEAD) if stored.endswith(each)}
    if name in found:
        return found[name]
    if name == HEAD and EMBEDDING in found and target.config.get_text_config().tie_word_embeddings:
        return found[EMBEDDING]
    raise UserError(
        f"{target.option} {target.name} has no {name}, which {kind.what} without one of its "
        "own reads there: choose a target of the family that the draft was trained for"
    )


def _spared(kind: OwnFilesDrafter, expected: Mapping[str, Tensor]) -> set[str]:
    """What files need not hold: embeddings, and the maps, perhaps the head, of a draft that knows all ids."""
    spared = {EMBEDDING, "t2d"}
    if len(expected["d2t"]) == len(expected["t2d"]):
        spared |= {"d2t", HEAD} if kind.takes_head else {"d2t"}
    return spared


def _check_map(draft: Checkpoint, model: Any) -> None:
    ids = model.known_ids
    if len(ids.unique()) < len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < model.config.vocab_size:
        raise UserError(
            f"{draft.option} {draft.name}: d2t does not give every id of the draft one of the target's "
            f"{model.config.vocab_size}: fetch it again"
        )


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
