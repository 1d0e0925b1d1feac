"""A dry run tells how each layer of a model attends, and what of it is not implemented here.

The rules of attention reach transformers' own functions in two ways: as keyword arguments, and in the mask,
which alone says the window of some families. So in a dry run transformers is asked for masks, each layer's
is recognised by its memory, and its rule is read off the function that it would be made with. A mask that a
model changes, a second attention in a layer or an argument that is not known here would be ignored without an
error: they are refused.

T flat tokens, H heads, G key/value heads, D head width.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel

from specdist.models.attention.attention import (
    ATTENTION_NAME,
    AttentionCall,
    AttentionKind,
    AttentionRules,
    absorption_of,
    attend_of_registry,
    attending,
)
from specdist.models.attention.rope import rope_border, ropes_of
from specdist.models.cache.key_value import LayerShape
from specdist.models.families.adapters import ADAPTERS, is_paged_by_registry, use_attention
from specdist.models.files.checkpoint import STATE_LAYER_TYPES, TOKENWISE_LAYER_TYPES
from specdist.models.recurrent.kinds import mixer_of
from specdist.models.recurrent.mixers import Mixer, one_token
from specdist.models.recurrent.runs import StateShape
from specdist.utils.errors import UserError

DRY_RUN_NAME = "specdist_dry_run"
# Keyword arguments that change nothing in attention over pages: positions are in the queries and keys, and
# nothing is dropped at random while generating.
HARMLESS = {"dropout", "position_ids", "cache_position", "logits_to_keep", "output_attentions", "use_cache"}
# Longer windows than any model's.
MOST_POSITIONS = 2**20

logger = logging.getLogger(__name__)

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_recorder: ContextVar[LayerShapes] = ContextVar("the dry run of this thread")


class LayerShapes:
    """Stands in for the cache in a dry run and records every layer's keys and values and rules.

    ``kinds`` are those of attention that occur, ``states`` what recurrent layers keep. ``foreign`` names what
    is not implemented here (such as attention to later tokens), and would be ignored without an error.
    """

    def __init__(self, num_positions: int = MOST_POSITIONS, *, keeps_latents: bool = True) -> None:
        """``num_positions``: a window that is longer is none; ``keeps_latents``: in the model's passes."""
        self.keeps_latents = keeps_latents
        self.shapes: dict[int, LayerShape] = {}
        self.rules: dict[int, AttentionRules] = {}
        self.states: dict[int, StateShape] = {}
        self.kinds: list[AttentionKind] = []
        self.foreign: set[str] = set()
        self._num_positions = min(num_positions, MOST_POSITIONS)
        # The masks that were made, by their memory, which are kept so that it stays theirs.
        self._masks: dict[int, tuple[Tensor, int | None]] = {}

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        queries_THD, keys_TGD, values_TGD, rules, sinks_H, _ = call
        if sinks_H is not None and len(sinks_H) != queries_THD.shape[1]:
            raise ValueError(f"{len(sinks_H)} attention sinks for {queries_THD.shape[1]} heads")
        (_, num_heads, width), value_width = keys_TGD.shape, values_TGD.shape[2]
        self.shapes[layer] = LayerShape(num_heads, width, value_width, rules.is_latent)
        self.rules[layer] = rules
        own_width = None if value_width == width else value_width
        kind = AttentionKind(queries_THD.shape[1], num_heads, width, rules, own_width)
        if kind not in self.kinds:
            self.kinds.append(kind)
        return queries_THD.new_zeros((*queries_THD.shape[:2], values_TGD.shape[2]))

    @property
    def windows(self) -> dict[int, int | None]:
        """The last tokens that a token sees in every layer, if not all."""
        return {layer: rules.window for layer, rules in self.rules.items()}

    def hide_first(self) -> None:
        """Nobody sees a sequence's first token."""
        self.rules = {layer: rules._replace(hides_first=True) for layer, rules in self.rules.items()}
        self.kinds = [kind._replace(rules=kind.rules._replace(hides_first=True)) for kind in self.kinds]

    def mix(self, mixer: Mixer, rows_TR: Tensor) -> Tensor:
        """Take the place of a pass over states."""
        if mixer.layer in self.states:
            self.foreign.add("two states in a layer")
        self.states[mixer.layer] = mixer.shape
        return one_token(mixer, rows_TR)

    def make_mask(self, mask_function: MaskFunction, q_length: int, kv_length: int, **kwargs: Any) -> Tensor:
        """A mask in the place of transformers', whose rule ``mask_function`` is."""
        window: int | None = None
        try:
            window = window_of(mask_function, self._num_positions)
        except ValueError as error:
            self.foreign.add(str(error))
        mask = torch.zeros(1, 1, q_length, kv_length, dtype=kwargs["dtype"], device=kwargs["device"])
        self._masks[mask.untyped_storage()._cdata] = (mask, window)
        return mask

    def record(
        self, layer: int | None, mask: Tensor | None, window: int | None, kwargs: Mapping[str, Any]
    ) -> int | None:
        """Notes what is not implemented in a layer's call; its window, by its mask if it has one."""
        if layer is None:
            self.foreign.add("layers without a number")
        if layer in self.rules:
            self.foreign.add("two attentions in a layer")
        if kwargs.get("is_causal", True) is False:
            self.foreign.add("attention to later tokens")
        self.foreign |= {
            name
            for name, value in kwargs.items()
            if name not in {*HARMLESS, "is_causal"} and value is not None and value is not False
        }
        if mask is None:
            return window
        # A part of a mask has its memory, too.
        found = self._masks.get(mask.untyped_storage()._cdata)
        if found is None:
            self.foreign.add("a mask of its own")
            return window
        return found[1]


def window_of(mask_function: MaskFunction, num_positions: int) -> int | None:
    """The last tokens that a token sees, itself among them; None if these are all. Raises ValueError for
    any other rule."""
    zero, keys_L = torch.zeros((), dtype=torch.int64), torch.arange(num_positions)
    window = num_positions
    for query in (num_positions - 1, num_positions // 2, min(7, num_positions - 1), 0):
        try:
            is_seen_L = mask_function(zero, zero, torch.tensor(query), keys_L).expand(num_positions)
        except Exception as error:  # functions may need whatever they were made for
            raise ValueError("a mask of an unknown rule") from error
        if query == num_positions - 1:
            window = int(is_seen_L.sum())
        if not torch.equal(is_seen_L, (keys_L <= query) & (keys_L > query - window)):
            raise ValueError("a mask that is neither causal nor a sliding window")
    return window if window < num_positions else None


@contextlib.contextmanager
def recording(model: PreTrainedModel, shapes: LayerShapes) -> Iterator[None]:
    """A context in which calls of the model are a dry run. It has no effect on models that do not go through
    the registry: they call their :class:`specdist.models.attention.attention.LayerAttention` themselves."""
    token = _recorder.set(shapes)
    is_switched = is_paged_by_registry(model)
    try:
        if is_switched:
            use_attention(model, DRY_RUN_NAME)
        yield
    finally:
        if is_switched:
            use_attention(model, ATTENTION_NAME)
        _recorder.reset(token)


def positions_of(model: PreTrainedModel) -> int:
    """The longest sequence that the model was made for."""
    config = model.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or MOST_POSITIONS)


def refuse_foreign(model: PreTrainedModel, shapes: LayerShapes, name: str) -> None:
    """Raises :class:`UserError` if the model's attention is not implemented; ``name``: of the model."""
    config = model.config.get_text_config()
    kinds = Counter(getattr(config, "layer_types", None) or [])
    num_layers = config.num_hidden_layers - sum(kinds[kind] for kind in TOKENWISE_LAYER_TYPES)
    reason = ", ".join(sorted(shapes.foreign | _windows_of_the_cache(model, shapes)))
    num_mixing = len({*shapes.shapes, *shapes.states})
    if not reason and num_mixing != num_layers:
        reason = f"only {num_mixing} of {num_layers} layers have attention or a state"
    if reason:
        raise UserError(
            f"{name} is of the family {model.config.model_type}, whose attention specdist does not "
            f"implement ({reason}): choose a model of another family (Llama, Qwen, Gemma, ...)"
        )


def refuse_unknown_states(model: PreTrainedModel, name: str) -> None:
    """Raises :class:`UserError` if a layer keeps a state of a kind that is not known here."""
    config = model.config.get_text_config()
    known = {mixer.layer for module in model.modules() if (mixer := mixer_of(module)) is not None}
    kinds = enumerate(getattr(config, "layer_types", None) or [])
    unknown = {kind for layer, kind in kinds if kind in STATE_LAYER_TYPES and layer not in known}
    if unknown:
        raise UserError(
            f"{name} is of the family {config.model_type} and has layers ({', '.join(sorted(unknown))}) of "
            "a kind that specdist does not implement: choose a model of another family (Llama, Qwen, ...)"
        )


def _windows_of_the_cache(model: PreTrainedModel, shapes: LayerShapes) -> set[str]:
    """What ``generate`` forgets that no mask hides."""
    found: set[str] = set()
    if not is_paged_by_registry(model):
        return found
    layers = DynamicCache(config=model.config).layers
    for layer, rules in shapes.rules.items():
        # The last layers may share what others have kept.
        window = getattr(layers[layer], "sliding_window", None) if layer < len(layers) else None
        if window is not None and window < positions_of(model) and window != rules.window:
            found.add(f"a window of {window} tokens that the cache alone has")
    return found


def dry_run(model: PreTrainedModel) -> LayerShapes:
    """One token through a model on the meta device, without weights. May raise anything: code that looks at
    values, which are not there, and where shapes do not fit."""
    shapes = LayerShapes(positions_of(model))
    try:
        rope_border(model.config)
    except ValueError as error:
        shapes.foreign.add(str(error))
    use_attention(model, ATTENTION_NAME)
    token = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    experts = model.config._experts_implementation if model._can_set_experts_implementation() else None
    try:
        if experts is not None:
            model.set_experts_implementation("batched_mm")  # the others look at values
        # With a mask transformers does not look for several texts in the positions, which have no values.
        with torch.inference_mode(), _unchanged(model), recording(model, shapes), attending(shapes, {}):
            _use_plain_ropes(model)
            model(input_ids=token, attention_mask=torch.ones_like(token), use_cache=False)
    finally:
        if experts is not None:
            model.set_experts_implementation(experts)
    return shapes


def _use_plain_ropes(model: nn.Module) -> None:
    """Leave out what chooses the frequencies of some ropes by the largest position, which has no value."""
    for module in ropes_of(model):
        module.forward = partial(inspect.unwrap(type(module).forward), module)


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """A context whose calls leave nothing in the modules, such as frequencies of ropes, which are made when
    they are first needed: these would have no numbers."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def check_attention(model: PreTrainedModel, name: str) -> None:
    """Refuse a model on the meta device, without weights, whose attention is not implemented.

    Raises :class:`UserError`. Where the model cannot run there, the runner's dry run finds the same later.
    """
    refuse_unknown_states(model, name)
    if model.config.model_type in ADAPTERS:
        return
    try:
        shapes = dry_run(model)
    except Exception:  # code that looks at values, which are not there
        logger.debug("no dry run without weights of %s", name, exc_info=True)
        return
    refuse_foreign(model, shapes, name)


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registry's interface."""
    shapes = _recorder.get()
    layer = getattr(module, "layer_idx", None)
    window = shapes.record(layer, attention_mask, sliding_window, kwargs)
    rules = AttentionRules(scaling, window, softcap, s_aux is not None)
    if absorption_of(module) is not None:
        # Not by the width of what is attended to: that of the layer's own queries.
        rules = rules._replace(scale=scaling or query.shape[-1] ** -0.5, is_latent=True)
    output_THD = attend_of_registry(shapes, layer or 0, module, (query, key, value), rules, s_aux)
    return output_THD[None], None


def _make_mask(*, mask_function: MaskFunction, q_length: int, kv_length: int, **kwargs: Any) -> Tensor:
    return _recorder.get().make_mask(mask_function, q_length, kv_length, **kwargs)


AttentionInterface.register(DRY_RUN_NAME, _record)
AttentionMaskInterface.register(DRY_RUN_NAME, _make_mask)
