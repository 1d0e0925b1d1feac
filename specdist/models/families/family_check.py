"""Which families of models the engine can run, and shard."""

from __future__ import annotations

import inspect
from typing import cast

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from specdist.models.families.adapters import can_page_attention
from specdist.models.files.checkpoint import (
    STATE_LAYER_TYPES,
    TOKENWISE_LAYER_TYPES,
    UNSHARDABLE_FAMILIES,
    Checkpoint,
    auto_class,
)
from specdist.models.files.damage import reading
from specdist.utils.errors import UserError

# In generate() they take no positions.
SHIFTED_FAMILIES = ("kosmos-2", "kosmos-2.5")
# Other kinds (chunked, ...) would be run as full attention without an error.
LAYER_TYPES = {"full_attention", "sliding_attention", *STATE_LAYER_TYPES, *TOKENWISE_LAYER_TYPES}


def causal_model_class(checkpoint: Checkpoint) -> type[PreTrainedModel] | None:
    """The class that transformers would build, or that of its text model; None for a family that is not a
    causal language model."""
    config = checkpoint.config
    reference = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if checkpoint.trusts_code and reference:
        with reading(f"{checkpoint.option} {checkpoint.name}: its own code"):
            return cast(type[PreTrainedModel], get_class_from_dynamic_module(reference, checkpoint.folder))
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config.get_text_config()), None)
    if found is None and auto_class(config) is AutoModelForImageTextToText:
        found = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    return found


def check_family(checkpoint: Checkpoint, tp_size: int) -> None:
    """Refuse a model that the engine cannot run, or cannot shard over ``tp_size`` ranks, by name."""
    family, reason = _why_not(checkpoint)
    what = f"{checkpoint.option} {checkpoint.name} is of the family {family}"
    if reason is not None:
        raise UserError(f"{what}, {reason}: choose a model of another family (Llama, Qwen, Gemma, ...)")
    if tp_size > 1 and family in UNSHARDABLE_FAMILIES:
        raise UserError(f"{what}, which cannot be cut over ranks: use --tp_size 1")


def _why_not(checkpoint: Checkpoint) -> tuple[str, str | None]:
    """The family that a model is of, and why the engine cannot run it; None if it can."""
    config, whole = checkpoint.config.get_text_config(), checkpoint.config.model_type
    family, by_itself = config.model_type, "and specdist runs tokens of many sequences in one pass"
    model_class = causal_model_class(checkpoint)
    if model_class is None:
        return family, "which is not a causal language model"
    if others := set(getattr(config, "layer_types", None) or []) - LAYER_TYPES:
        return family, f"and has layers ({', '.join(sorted(others))}) that specdist does not implement"
    if not can_page_attention(model_class, family):
        return family, "whose attention is not in transformers' attention registry, so specdist cannot run it"
    if not hasattr(config, "num_hidden_layers"):
        return family, "which is not a stack of layers"
    # A model within another hands its arguments on; recurrent layers need none.
    if (
        config is checkpoint.config
        and set(getattr(config, "layer_types", None) or ["full_attention"]) != {"linear_attention"}
        and "position_ids" not in inspect.signature(model_class.forward).parameters
    ):
        return family, f"whose model ({model_class.__name__}) takes no positions of its tokens, {by_itself}"
    if whole in SHIFTED_FAMILIES:
        return whole, f"which counts the positions of its tokens by itself, {by_itself}"
    if getattr(checkpoint.config, "is_encoder_decoder", False):
        return whole, "which has an encoder beside its decoder"
    return family, None
