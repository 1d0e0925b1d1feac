"""Checks and loads the files of an EAGLE-3 draft; its embeddings are read from the target's."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdist.models.drafters.eagle3 import LlamaForCausalLMEagle3, check_eagle3_config
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.files.damage import reading
from specdist.models.files.weight_files import open_weights
from specdist.models.files.weight_stream import Reading
from specdist.models.loading.loading import refuse_missing
from specdist.models.quantized.quantized_loading import PLAIN_KINDS
from specdist.utils.errors import UserError

EMBEDDING = "embed_tokens.weight"
# Some files name the vocabulary map and the layer as parts of the model.
PREFIX = "model."
MAP_KINDS = {"d2t": "I64", "t2d": "BOOL"}


def check_eagle3(draft: Checkpoint, target: Checkpoint) -> None:
    """Compare the draft with the target, and its configuration with the headers of its files.

    Raises :class:`UserError` for a draft of another target, another form, or with other tensors.
    """
    what = f"{draft.option} {draft.name}"
    check_eagle3_config(what, draft.config, target.config)
    with reading(f"{what}: config.json"), torch.device("meta"):
        expected = LlamaForCausalLMEagle3(copy.deepcopy(draft.config)).state_dict()
    found: set[str] = set()
    with reading(f"{what}: its weight files"):
        for path in draft.weight_files:
            with open_weights(path) as file:
                for stored in file.names:
                    name = stored.removeprefix(PREFIX)
                    if name not in expected:
                        raise UserError(
                            f"{what}: nothing in an EAGLE-3 draft takes {stored}: it is of another form, "
                            "which is not read here; choose one in the published form"
                        )
                    if file.shape(stored) != expected[name].shape:
                        raise UserError(
                            f"{what}: {stored} is of shape {list(file.shape(stored))} in the files, but "
                            f"config.json asks for {list(expected[name].shape)}: fetch both again"
                        )
                    if name not in MAP_KINDS and file.kind(stored) not in PLAIN_KINDS:
                        raise UserError(
                            f"{what}: {stored} is stored as {file.kind(stored)}, and an EAGLE-3 draft is "
                            "read in plain numbers only: choose one that is not quantised"
                        )
                    found.add(name)
    refuse_missing(draft, set(expected) - found - _spared(expected))
    if EMBEDDING not in found:
        _embedding_place(target)


def load_eagle3(
    draft: Checkpoint,
    target: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    counted: Reading | None = None,
    beside: PreTrainedModel | None = None,
) -> LlamaForCausalLMEagle3:
    """The draft on one device. Raises :class:`UserError` if files have changed since they were checked."""
    with torch.device("meta"):
        model = LlamaForCausalLMEagle3(copy.deepcopy(draft.config))
    model = model.to(dtype=dtype).to_empty(device=device)
    # Its frequencies are not weights, and need float32.
    model.rotary_emb = LlamaRotaryEmbedding(model.config).to(device)
    model.know(torch.arange(len(model.d2t)))
    wanted = model.state_dict()
    missing = set(wanted)
    with torch.no_grad(), reading(f"{draft.option} {draft.name}: its weight files"):
        for path in draft.weight_files:
            with open_weights(path) as file:
                for stored in file.names:
                    name = stored.removeprefix(PREFIX)
                    wanted[name].copy_(file.read(stored))
                    missing.discard(name)
                    if counted is not None:
                        counted.num_bytes += wanted[name].nbytes
        if EMBEDDING in missing:
            wanted[EMBEDDING].copy_(target_embedding(target))
            missing.discard(EMBEDDING)
    refuse_missing(draft, missing - _spared(wanted))
    _check_map(draft, model)
    return model.eval()


def target_embedding(target: Checkpoint) -> Tensor:
    """[V, E]: read from the target's files. Raises :class:`UserError` if there is none."""
    path, name = _embedding_place(target)
    with reading(f"{target.option} {target.name}: {path}"), open_weights(target.folder / path) as file:
        return file.read(name)


def _embedding_place(target: Checkpoint) -> tuple[str, str]:
    """File and name of the target's embeddings."""
    for path in target.weight_files:
        with reading(f"{target.option} {target.name}: {path.name}"), open_weights(path) as file:
            for name in file.names:
                if name.endswith(EMBEDDING):
                    return path.name, name
    raise UserError(
        f"{target.option} {target.name} has no {EMBEDDING}, which an EAGLE-3 draft without embeddings of its "
        "own reads there: choose a target of the family that the draft was trained for"
    )


def _spared(expected: Mapping[str, Tensor]) -> set[str]:
    """What files need not hold: embeddings, and the maps of a draft that knows all ids."""
    is_whole = len(expected["d2t"]) == len(expected["t2d"])
    return {EMBEDDING, "t2d", *(["d2t"] if is_whole else [])}


def _check_map(draft: Checkpoint, model: LlamaForCausalLMEagle3) -> None:
    ids = model.known_ids
    if len(ids.unique()) < len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < model.config.vocab_size:
        raise UserError(
            f"{draft.option} {draft.name}: d2t does not give every id of the draft one of the target's "
            f"{model.config.vocab_size}: fetch it again"
        )
