"""A few layers, rows of the vocabulary and experts of a checkpoint, as a small model that transformers runs.

Nothing here is shared with what is compared with it: transformers builds and loads the small model, makes its
masks, keeps its cache and computes its attention, one row after the other.

T tokens of a row, V ids of the vocabulary, H heads, G key/value heads, D head width.
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
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from specdist.models.attention.rope import rope_border
from specdist.models.families.computed import build_without_weights
from specdist.models.files.checkpoint import Checkpoint, without_towers
from specdist.models.files.weight_files import StoredTensors, open_weights, stored_shapes
from specdist.models.loading.quantized_tensors import QuantizedTensors
from specdist.models.loading.weight_names import WeightNames
from specdist.models.quantized.input_rounding import rounded_values
from specdist.models.quantized.quantized import plain_config, quantization_of
from specdist.models.quantized.quantized_linear import QuantizedLinear
from specdist.models.quantized.quantized_weights import LayerFormat, QuantizedWeight, held
from specdist.models.start_check.expert_sample import ExpertSample
from specdist.utils.packages import STATES_ARGUMENT, cache_argument

# Of a row, if its model has no window, and beyond one.
NUM_TOKENS, NUM_BEYOND_WINDOW = 32, 8
NUM_IDS = 256
# Longer windows are shortened, in the small model and in the loaded one: a row past them would cost minutes.
MOST_WINDOW, SHORT_WINDOW = 512, 12
# Run one by one, as generate does.
NUM_STEPS = 4
# Far enough: with rotary frequencies in bfloat16 angles are wrong by radians well before.
MOST_POSITIONS = 8192
# What layers call their own number.
LAYER_NUMBERS = ("layer_idx", "layer_id", "layer_number")
# What configurations of towers for images and sounds call the number of their layers.
TOWER_LAYERS = ("num_hidden_layers", "depth")
UNLIMITED = (0.0, float("inf"))
ATTENTION_NAME = "specdist_recorded_reference"
_found: ContextVar[dict[str, list[Tensor]]] = ContextVar("what the reference's layers attend to")


@dataclass(frozen=True)
class Sample:
    """The tokens that are run: a few ids of the vocabulary, at positions up to thousands, through a few
    layers.

    Attributes:
        rows: positions of each row's tokens, all rows of one length. With a rope that has a border there is
            one below it, and one past it.
        config: values of the configuration that are others than the checkpoint's.
        experts: that tokens may choose; None: all.
    """

    layers: tuple[int, ...]
    vocab_ids: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    config: Mapping[str, Any]
    experts: ExpertSample | None = None

    @property
    def num_tokens(self) -> int:
        """Of a row."""
        return len(self.rows[0])

    def tokens(self, row: int) -> np.ndarray:
        """Index of each token of a row in ``vocab_ids``: [T]."""
        # A step without a common factor with the number of ids spreads the tokens over the vocabulary.
        return (row + np.arange(self.num_tokens)) * 101 % len(self.vocab_ids)

    def token_ids(self, row: int) -> np.ndarray:
        """The tokens' ids in the whole vocabulary: [T]."""
        return np.array(self.vocab_ids)[self.tokens(row)]


def choose_sample(checkpoint: Checkpoint, vocab_size: int, model: PreTrainedModel) -> Sample:
    """A sample of the loaded model; the same on every rank."""
    config = checkpoint.config.get_text_config()
    if getattr(config, "hidden_size_per_layer_input", None):
        raise NotImplementedError(
            "one table has the inputs of all layers, and cannot be cut to those of a few"
        )
    changed: dict[str, Any] = {}
    border = rope_border(config)
    borders = set() if border is None else {border}
    num_tokens = min(NUM_TOKENS, checkpoint.max_positions, *borders)
    window = getattr(config, "sliding_window", None) or getattr(config, "window_size", None)
    if isinstance(window, int) and window < checkpoint.max_positions:
        if window > MOST_WINDOW:
            window = SHORT_WINDOW
            # That of other names is in the model's memory already, and the check says so.
            changed = {"sliding_window": window} if hasattr(config, "sliding_window") else {}
        num_tokens = min(max(num_tokens, window + NUM_BEYOND_WINDOW), checkpoint.max_positions)
    experts = ExpertSample.of(model, config)
    ends = {min(checkpoint.max_positions, MOST_POSITIONS), *borders}
    return Sample(
        layers=_choose_layers(checkpoint),
        vocab_ids=tuple(np.unique(np.linspace(0, vocab_size - 1, NUM_IDS).astype(int)).tolist()),
        rows=tuple(
            _spread(num_tokens, end) for end in sorted(ends) if num_tokens <= end <= checkpoint.max_positions
        ),
        config=changed | (experts.config if experts is not None else {}),
        experts=experts,
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
    # The prompt's last token and those after it: a prompt beyond a border is a long one from its beginning.
    last = np.arange(end - NUM_STEPS - 1, end)
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
    vocabulary = {
        f"{name}.{kind}"
        for name, module in model.named_modules()
        for kind in ("weight", "bias")
        if module is model.get_input_embeddings() or module is model.get_output_embeddings()
    }
    found: dict[str, Tensor] = {}
    found_parts: dict[str, dict[str, Tensor]] = {}
    of_layers: dict[str, Tensor | QuantizedWeight] = {}

    def renamed(name: str, taken: Iterable[str]) -> str | None:
        """As in the model of the sample's layers only; None for another layer. ``taken``: its names in the
        whole model, which tell other lists of layers, such as a vision tower's."""
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

    Returns by name, float32 on the CPU, of all rows' tokens: queries [T, H * D], keys and values [T, G * D]
    of every layer after the rotary embedding, and logits [T, V].
    """
    config = copy.deepcopy(plain_config(checkpoint))
    text = config.get_text_config()
    for name, value in {**layered(text, sample.layers), **sample.config}.items():
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
    model = model.to(device).eval()
    found = [_run_row(model, sample, row, device) for row in range(len(sample.rows))]
    return {name: torch.cat([each[name] for each in found]) for name in found[0]}


@torch.inference_mode()
def _run_row(model: PreTrainedModel, sample: Sample, row: int, device: torch.device) -> dict[str, Tensor]:
    """As ``generate`` runs a row: its prompt, then token by token over the cache; all in one pass if single
    steps of transformers' drop a limit of time steps, which is right for every token."""
    recorded: dict[str, list[Tensor]] = {}
    token = _found.set(recorded)
    token_ids_1T = torch.from_numpy(sample.tokens(row)).to(device)[None]
    positions_1T = torch.tensor(sample.rows[row], device=device)[None]
    cache, cache_name = DynamicCache(config=model.config), cache_argument(model.forward)
    has_mask = cache_name != STATES_ARGUMENT
    limits = {tuple(getattr(each, "time_step_limit", UNLIMITED)) for each in model.modules()}
    num_steps = NUM_STEPS if limits <= {UNLIMITED} else 0
    begins = [0, *range(sample.num_tokens - num_steps, sample.num_tokens)]
    try:
        for begin, end in zip(begins, [*begins[1:], sample.num_tokens], strict=True):
            output = model(
                input_ids=token_ids_1T[:, begin:end],
                position_ids=positions_1T[:, begin:end],
                # Without it, gaps between positions would be taken for the ends of texts.
                attention_mask=torch.ones(1, end, dtype=torch.int64, device=device) if has_mask else None,
                use_cache=True,
                **{cache_name: cache},
            )
            recorded.setdefault("logits", []).append(output.logits[0].float().cpu())
    finally:
        _found.reset(token)
    found = {}
    for name, parts in recorded.items():
        layer, _, what = name.partition(" ")
        # By the layer's number in the whole model.
        found[f"layer {sample.layers[int(layer)]} {what}" if what else name] = torch.cat(parts)
    return found


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The eager attention of the module's own family, which adds the mask; what is new in its inputs is
    recorded."""
    num_new = query.shape[2]
    for what, tensor in (("queries", query), ("keys", key), ("values", value)):
        new_TW = tensor[0, :, -num_new:].transpose(0, 1).flatten(1).float().cpu()
        _found.get().setdefault(f"{module.layer_idx} {what}", []).append(new_TW)
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


def find_layers(model: PreTrainedModel) -> tuple[nn.Module, str, nn.ModuleList]:
    """The list of decoder layers, the module that holds it, and its name there. Raises
    NotImplementedError."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    num_layers = model.config.get_text_config().num_hidden_layers
    for within in (decoder, model):
        for owner in within.modules():
            for leaf, module in owner.named_children():
                if isinstance(module, nn.ModuleList) and len(module) == num_layers:
                    return owner, leaf, module
    raise NotImplementedError(f"{type(model).__name__} has no list of {num_layers} layers")


def layered(config: Any, layers: Sequence[int]) -> dict[str, Any]:
    """The values of a configuration that depend on its layers, cut to these layers."""
    num_layers = config.num_hidden_layers
    found = {
        name: [value[layer] for layer in layers]
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == num_layers
    }
    return {**found, "num_hidden_layers": len(layers)}
