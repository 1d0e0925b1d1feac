"""A few layers, rows of the vocabulary and experts of a checkpoint, as a small model that transformers runs.

Nothing here is shared with what is compared with it: transformers builds and loads the small model, makes its
masks and computes its attention.

T tokens, V ids of the vocabulary, H heads, G key/value heads, D head width.
"""

from __future__ import annotations

import contextlib
import copy
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from specdist.models.families.computed import build_without_weights
from specdist.models.files.checkpoint import Checkpoint, without_towers
from specdist.models.files.weight_files import StoredTensors, open_weights, stored_shapes
from specdist.models.loading.quantized_tensors import QuantizedTensors
from specdist.models.loading.weight_names import WeightNames, parameters_of_vocabulary
from specdist.models.passes.hidden import find_layers
from specdist.models.quantized.input_rounding import rounded_values
from specdist.models.quantized.quantized import plain_config, quantization_of
from specdist.models.quantized.quantized_linear import QuantizedLinear
from specdist.models.quantized.quantized_weights import LayerFormat, QuantizedWeight, held
from specdist.models.start_check.expert_sample import ExpertSample
from specdist.utils.packages import STATES_ARGUMENT, cache_argument

# The last of them at the end of the positions.
NUM_TOKENS, NUM_LAST = 32, 5
NUM_IDS = 256
# Far enough: with rotary frequencies in bfloat16 angles are wrong by radians well before.
MOST_POSITIONS = 8192
# What layers call their own number.
LAYER_NUMBERS = ("layer_idx", "layer_id", "layer_number")
# What configurations of towers for images and sounds call the number of their layers.
TOWER_LAYERS = ("num_hidden_layers", "depth")
ATTENTION_NAME = "specdist_recorded_reference"
_found: ContextVar[dict[str, Tensor]] = ContextVar("what the reference's layers attend to")


@dataclass(frozen=True)
class Sample:
    """The tokens that are run: a few ids of the vocabulary, at positions up to thousands, through a few
    layers.

    Attributes:
        positions: of the tokens, ascending.
        experts: that tokens may choose; None: all.
    """

    layers: tuple[int, ...]
    vocab_ids: tuple[int, ...]
    positions: tuple[int, ...]
    experts: ExpertSample | None = None

    @property
    def tokens(self) -> np.ndarray:
        """Index of each token in ``vocab_ids``: [T]."""
        # A step without a common factor with the number of ids spreads the tokens over the vocabulary.
        return np.arange(len(self.positions)) * 101 % len(self.vocab_ids)

    @property
    def token_ids(self) -> np.ndarray:
        """The tokens' ids in the whole vocabulary: [T]."""
        return np.array(self.vocab_ids)[self.tokens]

    def changes(self, config: Any) -> dict[str, Any]:
        """Values of the texts' configuration that are others for these layers and experts."""
        return {**layered(config, self.layers), **({} if self.experts is None else self.experts.config)}


def choose_sample(checkpoint: Checkpoint, vocab_size: int, model: PreTrainedModel) -> Sample:
    """A sample of the loaded model; the same on every rank."""
    config = checkpoint.config.get_text_config()
    if getattr(config, "hidden_size_per_layer_input", None):
        raise NotImplementedError(
            "one table has the inputs of all layers, and cannot be cut to those of a few"
        )
    return Sample(
        layers=_choose_layers(checkpoint),
        vocab_ids=tuple(np.unique(np.linspace(0, vocab_size - 1, NUM_IDS).astype(int)).tolist()),
        positions=_spread(
            min(NUM_TOKENS, checkpoint.max_positions), min(MOST_POSITIONS, checkpoint.max_positions)
        ),
        experts=ExpertSample.of(model, config),
    )


def _choose_layers(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The first and the last one, and one of every kind; or, where a configuration says by their numbers what
    layers are, so that others would take their places, the first ones as far as to the last new kind."""
    config = checkpoint.config.get_text_config()
    num_layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or []
    layers = sorted({0, num_layers - 1, *(list(kinds).index(kind) for kind in set(kinds))})
    *_, stack = find_layers(build_without_weights(checkpoint, torch.float32))
    made = [_parts(layer) for layer in stack]
    changed = replace(checkpoint, config=copy.deepcopy(checkpoint.config))
    for name, value in layered(config, layers).items():
        setattr(changed.config.get_text_config(), name, value)
    *_, cut_stack = find_layers(build_without_weights(changed, torch.float32))
    if [_parts(layer) for layer in cut_stack] == [made[layer] for layer in layers]:
        return tuple(layers)
    return tuple(range(1 + max(map(made.index, made))))


def _parts(layer: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, weight.shape) for name, weight in layer.named_parameters()]


def _spread(num_tokens: int, end: int) -> tuple[int, ...]:
    """Ascending positions below ``end``, the last ones among them, and most others near the beginning."""
    last = np.arange(end - min(NUM_LAST, num_tokens), end)
    num_first, end = num_tokens - len(last), end - len(last)
    wanted, steps = np.geomspace(1, max(1, end), num_first).astype(int) - 1, np.arange(num_first)
    ascending = np.maximum.accumulate(wanted - steps) + steps
    return (*np.minimum(ascending, end - num_first + steps).tolist(), *last.tolist())


@dataclass(frozen=True, kw_only=True)
class StoredSample:
    """The tensors of a sample, with quantised weights as the numbers that they mean, and by the name of a
    layer how its inputs are rounded: its format, a stored scale, and the columns of each rank if they are
    cut; and by module the numbers that were computed for a model of all layers."""

    tensors: Mapping[str, Tensor]
    rounded: Mapping[str, tuple[LayerFormat, Tensor | None, tuple[int, ...]]]
    numbers: Mapping[str, Mapping[str, float | int]]


def read_sample(checkpoint: Checkpoint, model: PreTrainedModel, sample: Sample) -> StoredSample:
    """The tensors of the sample's layers, numbered anew, and all others; over the vocabulary its rows."""
    owner, leaf, _ = find_layers(model)
    (owner_name,) = {name for name, module in model.named_modules() if module is owner}
    stack = f"{owner_name}.{leaf}.".lstrip(".")
    whole_model = build_without_weights(checkpoint, torch.float32)
    names = WeightNames(whole_model)
    lists = "|".join({leaf, *names.lists(stored_shapes(checkpoint.weight_files), stack)})
    in_layer = re.compile(rf"(^|\.)(?:{lists})\.(\d+)\.")
    shapes = stored_shapes(checkpoint.weight_files)
    quantized = QuantizedTensors(whole_model, names, quantization_of(checkpoint), shapes)
    vocabulary = parameters_of_vocabulary(model)
    found: dict[str, Tensor] = {}
    found_parts: dict[str, dict[str, Tensor]] = {}
    of_layers: dict[str, Tensor | QuantizedWeight] = {}

    def renamed(name: str, taken: Iterable[str]) -> str | None:
        """The name in the model of the sample's layers only; None for another layer. ``taken``: its names in
        the whole model, which tell other lists of layers, such as a vision tower's."""
        match = in_layer.search(name)
        if match is None or (taken and not any(each.startswith(stack) for each in taken)):
            return name
        if int(match[2]) not in sample.layers:
            return None
        own = f"{name[: match.start(2)]}{sample.layers.index(int(match[2]))}{name[match.end(2) :]}"
        return own if sample.experts is None else sample.experts.renamed(own)

    of_each = set() if sample.experts is None else sample.experts.of_each(whole_model)

    def read(file: StoredTensors, name: str, tensor: str) -> tuple[Tensor, Sequence[int] | None]:
        if sample.experts is None or names.renamed(tensor)[0] not in of_each:
            return file.read(name), None
        return sample.experts.read(file, name)

    for path in checkpoint.weight_files:
        with open_weights(path) as file:
            takers = names.takers(file.names)
            for name in file.names:
                new_name = renamed(name, takers[name])
                if new_name is None or names.is_unread(name):
                    continue
                quantising = {each.removesuffix(".weight") for each in takers[name]} & quantized.layers.keys()
                if name in quantized.parts:
                    tensor, part = quantized.parts[name]
                    found_parts.setdefault(tensor, {})[part], _ = read(file, name, tensor)
                elif quantising:
                    for layer in quantising:
                        of_layers[layer] = checkpoint.adapted(f"{layer}.weight", file.read(name))
                elif in_layer.search(name) is None and takers[name] & vocabulary:
                    found[new_name] = file.rows(name, sample.vocab_ids)
                    for taker in takers[name]:
                        found[new_name] = checkpoint.adapted(taker, found[new_name], sample.vocab_ids)
                else:
                    found[new_name], rows = read(file, name, name)
                    for taker in takers[name]:
                        found[new_name] = checkpoint.adapted(taker, found[new_name], rows)
    for tensor, parts in found_parts.items():
        if tensor.removesuffix(".weight") in quantized.layers:
            of_layers[tensor.removesuffix(".weight")] = quantized.matrices(tensor, parts)[tensor]
            continue
        new_name = renamed(tensor, ())
        assert new_name is not None
        found[new_name] = quantized.numbers(tensor, parts)
    rounded = {}
    for layer, whole in of_layers.items():
        new_name = renamed(f"{layer}.weight", {f"{layer}.weight"})
        assert new_name is not None
        weight = held(quantized.layers[layer], whole)
        found[new_name] = weight.dequantized(torch.float32)
        # The loaded model has some dequantised.
        if isinstance(loaded := model.get_submodule(layer), QuantizedLinear):
            sizes = loaded.cut.sizes if loaded.cut else ()
            rounded[new_name.removesuffix(".weight")] = (weight.form, weight.input_scale, sizes)

    def is_kept(module: str, key: str, value: object) -> bool:
        if sample.experts is not None and sample.experts.number(key, value) is not value:
            return False
        # Sizes outside of the layers are those of the sample's vocabulary.
        is_int = type(value) is int and f"{module}.".startswith(stack) and key not in LAYER_NUMBERS
        return is_int or type(value) is float

    numbers = {
        new_name.removesuffix("."): own
        for name, module in whole_model.named_modules()
        if (new_name := renamed(f"{name}.", {f"{name}."})) is not None
        and (own := {key: value for key, value in vars(module).items() if is_kept(name, key, value)})
    }
    return StoredSample(tensors=found, rounded=rounded, numbers=numbers)


def run_reference(
    model_class: type[PreTrainedModel],
    checkpoint: Checkpoint,
    sample: Sample,
    stored: StoredSample,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """Run a model of the sample's layers and ids only.

    Returns by name, float32 on the CPU: queries [T, H * D], keys and values [T, G * D]
    of every layer after the rotary embedding, and logits [T, V].
    """
    config = copy.deepcopy(plain_config(checkpoint))
    text = config.get_text_config()
    for name, value in sample.changes(text).items():
        setattr(text, name, value)
    text.vocab_size = len(sample.vocab_ids)
    for tower in (getattr(config, name, None) for name in config.sub_configs or ()):
        for name in TOWER_LAYERS if tower is not text else ():
            if hasattr(tower, name):  # no text reaches them
                setattr(tower, name, 1)
    for each in (config, text):
        # An id that the cut vocabulary may lack. Some families must have one.
        with contextlib.suppress(StrictDataclassFieldValidationError):
            each.pad_token_id = 0
            each.pad_token_id = None
    model, report = model_class.from_pretrained(
        None,
        config=config,
        state_dict=dict(stored.tensors),
        dtype=dtype,
        output_loading_info=True,
        attn_implementation="eager",
    )
    missing = set(report["missing_keys"]) - set(without_towers(model).unread)
    if missing:
        raise ValueError(f"{min(missing)} is missing")
    made = {name for name, _ in model.named_modules()}
    for name in made & stored.numbers.keys():  # towers have fewer layers
        # Some scale by the number of layers, or by that of the layer.
        vars(model.get_submodule(name)).update(stored.numbers[name])
    for name, (form, static, sizes) in stored.rounded.items():
        if form.activations is not None:
            scale = None if static is None else static.to(device, torch.float32)
            model.get_submodule(name).register_forward_pre_hook(partial(_round_inputs, form, scale, sizes))
    for each in model.modules():  # one of texts and images may not hand it on
        if isinstance(each, PreTrainedModel) and each._can_set_attn_implementation():
            each.set_attn_implementation(ATTENTION_NAME)
    found = _run_tokens(model.to(device).eval(), sample, device)
    # The tensors by the layers' numbers in the whole model.
    return {
        f"layer {sample.layers[int(layer)]} {what}" if what else layer: tensor
        for name, tensor in found.items()
        for layer, _, what in [name.partition(" ")]
    }


@torch.inference_mode()
def _run_tokens(model: PreTrainedModel, sample: Sample, device: torch.device) -> dict[str, Tensor]:
    """Run the tokens as one text, in one pass."""
    token_ids_1T = torch.from_numpy(sample.tokens).to(device)[None]
    # Without it, gaps between positions would be taken for the ends of texts.
    has_mask = cache_argument(model.forward) != STATES_ARGUMENT
    mask = {"attention_mask": torch.ones_like(token_ids_1T)} if has_mask else {}
    recorded: dict[str, Tensor] = {}
    token = _found.set(recorded)
    try:
        output = model(
            input_ids=token_ids_1T,
            position_ids=torch.tensor(sample.positions, device=device)[None],
            use_cache=False,
            **mask,
        )
    finally:
        _found.reset(token)
    return {"logits": output.logits[0].float().cpu(), **recorded}


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The eager attention of the module's own family, which adds the mask; its inputs are recorded."""
    for what, tensor in (("queries", query), ("keys", key), ("values", value)):
        _found.get()[f"{module.layer_idx} {what}"] = tensor[0].transpose(0, 1).flatten(1).float().cpu()
    family = sys.modules[type(module).__module__]
    attend: Callable[..., tuple[Tensor, Tensor | None]] = getattr(
        family, "eager_attention_forward", sdpa_attention_forward
    )
    return attend(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(ATTENTION_NAME, _attend)
AttentionMaskInterface.register(ATTENTION_NAME, eager_mask)


def _round_inputs(
    form: LayerFormat, static: Tensor | None, sizes: tuple[int, ...], _: nn.Module, inputs: tuple[Tensor]
) -> tuple[Tensor]:
    x_TK = inputs[0].flatten(0, -2)
    return (rounded_values(form, x_TK, static, sizes).view_as(inputs[0]),)


def layered(config: Any, layers: Sequence[int]) -> dict[str, Any]:
    """The values of a configuration that depend on its layers, cut to these layers."""
    num_layers = config.num_hidden_layers
    found = {
        name: [value[layer] for layer in layers]
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == num_layers
    }
    return {**found, "num_hidden_layers": len(layers)}
