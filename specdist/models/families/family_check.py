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
    config = checkpoint.config.get_text_config()
    family = config.model_type
    what = f"{checkpoint.option} {checkpoint.name}"
    other = "choose a model of another family (Llama, Qwen, Gemma, ...)"
    model_class = causal_model_class(checkpoint)
    if model_class is None:
        raise UserError(f"{what} is of the family {family}, which is not a causal language model: {other}")
    other_layers = set(getattr(config, "layer_types", None) or []) - LAYER_TYPES
    if other_layers:
        raise UserError(
            f"{what} is of the family {family} and has layers ({', '.join(sorted(other_layers))}) that "
            f"specdist does not implement: {other}"
        )
    if not can_page_attention(model_class, family):
        raise UserError(
            f"{what} is of the family {family}, whose attention does not go through transformers' attention "
            f"registry: specdist cannot run it; {other}"
        )
    if not hasattr(config, "num_hidden_layers"):
        raise UserError(f"{what} is of the family {family}, which is not a stack of layers: {other}")
    # A model within another hands its arguments on; recurrent layers need none.
    if (
        config is checkpoint.config
        and set(getattr(config, "layer_types", None) or ["full_attention"]) != {"linear_attention"}
        and "position_ids" not in inspect.signature(model_class.forward).parameters
    ):
        raise UserError(
            f"{what} is of the family {family}, whose model ({model_class.__name__}) takes no positions of "
            f"its tokens, and specdist runs tokens of many sequences in one pass: {other}"
        )
    whole = checkpoint.config.model_type
    if whole in SHIFTED_FAMILIES:
        raise UserError(
            f"{what} is of the family {whole}, which counts the positions of its tokens by itself, and "
            f"specdist runs tokens of many sequences in one pass: {other}"
        )
    if getattr(checkpoint.config, "is_encoder_decoder", False):
        raise UserError(f"{what} is of the family {whole}, which has an encoder beside its decoder: {other}")
    if tp_size > 1 and family in UNSHARDABLE_FAMILIES:
        raise UserError(f"{what} is of the family {family}, which cannot be cut over ranks: use --tp_size 1")
