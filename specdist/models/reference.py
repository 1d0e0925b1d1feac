"""A few layers of a checkpoint and a few rows of its vocabulary, as a small model and in the loaded one.

T tokens, V ids of the vocabulary, H heads, G key/value heads, D head width.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdist.models.adapters import use_paged_attention
from specdist.models.attention import AttentionRules, attend_segments
from specdist.models.checkpoint import Checkpoint
from specdist.models.computed import build_without_weights
from specdist.models.quantized import plain_config, quantization_of
from specdist.models.quantized_linear import input_scales, rounded_values
from specdist.models.quantized_loading import QuantizedParts
from specdist.models.quantized_weights import LayerFormat
from specdist.models.weight_files import open_weights
from specdist.models.weight_names import WeightNames

NUM_TOKENS, NUM_IDS = 32, 256
# Far enough: with rotary frequencies in bfloat16 angles are wrong by radians well before.
MOST_POSITIONS = 8192


@dataclass(frozen=True)
class Sample:
    """The tokens that are run: a few ids of the vocabulary, at positions up to thousands, through a few
    layers."""

    layers: tuple[int, ...]
    vocab_ids: tuple[int, ...]
    positions: tuple[int, ...]

    @property
    def tokens(self) -> np.ndarray:
        """Index of each token in ``vocab_ids``: [T]."""
        # A step without a common factor with the number of ids spreads the tokens over the vocabulary.
        return np.arange(len(self.positions)) * 101 % len(self.vocab_ids)

    @property
    def token_ids(self) -> np.ndarray:
        """The tokens' ids in the whole vocabulary: [T]."""
        return np.array(self.vocab_ids)[self.tokens]


def choose_sample(checkpoint: Checkpoint, vocab_size: int) -> Sample:
    """A sample of the model; the same on every rank."""
    config = checkpoint.config.get_text_config()
    num_layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or []
    layers = {0, num_layers - 1, *(list(kinds).index(kind) for kind in set(kinds))}
    last = min(checkpoint.max_positions, MOST_POSITIONS) - 1
    spread = np.geomspace(1, max(1, last), NUM_TOKENS - 1).astype(int)
    return Sample(
        layers=tuple(sorted(layers)),
        vocab_ids=tuple(np.unique(np.linspace(0, vocab_size - 1, NUM_IDS).astype(int)).tolist()),
        positions=tuple(np.unique([0, *spread]).tolist()),
    )


@contextlib.contextmanager
def only_layers(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[None]:
    """A context in which the model has only these layers. Raises NotImplementedError if its layers are not in
    one list."""
    config = model.config.get_text_config()
    owner, leaf, stack = _find_layers(model, config.num_hidden_layers)
    changed = _layered(config, layers)
    before = {name: getattr(config, name) for name in changed}
    try:
        setattr(owner, leaf, nn.ModuleList(stack[layer] for layer in layers))
        for name, value in changed.items():
            setattr(config, name, value)
        yield
    finally:
        setattr(owner, leaf, stack)
        for name, value in before.items():
            setattr(config, name, value)


@torch.inference_mode()
def run_sample(
    model: PreTrainedModel, sample: Sample, *, token_ids: np.ndarray, device: torch.device
) -> dict[str, Tensor]:
    """By name, float32 on the CPU: queries [T, H * D], keys and values [T, G * D] of every layer, and logits
    [T, V]."""
    positions_T = torch.tensor(sample.positions, device=device)
    attention = RecordingAttention(positions_T, sample.layers)
    output = model(
        input_ids=torch.from_numpy(token_ids).to(device)[None],
        position_ids=positions_T[None],
        use_cache=False,
        logits_to_keep=torch.arange(len(positions_T), device=device),
        paged_attention=attention,
    )
    return {**attention.found, "logits": output.logits[0].float().cpu()}


class RecordingAttention:
    """Replaces the paged cache: records the inputs of each layer's attention, and attends to these tokens
    only."""

    def __init__(self, positions_T: Tensor, layers: Sequence[int]) -> None:
        self.found: dict[str, Tensor] = {}
        self._ages_TT = positions_T[:, None] - positions_T
        self._layers = list(layers)

    def attend(
        self, layer: int, queries_THD: Tensor, keys_TGD: Tensor, values_TGD: Tensor, rules: AttentionRules
    ) -> Tensor:
        # Not by ``layer``: a cut model may number its layers anew. They are called in order.
        number = self._layers[len(self.found) // 3]
        for name, tensor in (("queries", queries_THD), ("keys", keys_TGD), ("values", values_TGD)):
            self.found[f"layer {number} {name}"] = tensor.flatten(1).float().cpu()
        is_hidden_TT = self._ages_TT < 0
        if rules.window is not None:
            is_hidden_TT |= self._ages_TT >= rules.window
        bias_TT = torch.zeros_like(is_hidden_TT, dtype=queries_THD.dtype).masked_fill(
            is_hidden_TT, -torch.inf
        )
        num_repeats = queries_THD.shape[1] // keys_TGD.shape[1]
        return attend_segments(
            queries_THD,
            keys_TGD.transpose(0, 1)[None],
            values_TGD.transpose(0, 1)[None],
            bias_TT.repeat(num_repeats, 1)[None, None],
            rules,
        )


@dataclass(frozen=True, kw_only=True)
class StoredSample:
    """The tensors of a sample, with quantised weights as the numbers that they mean, and by the name of a
    layer how its inputs are rounded: its format and a stored scale."""

    tensors: Mapping[str, Tensor]
    rounded: Mapping[str, tuple[LayerFormat, Tensor | None]]


def read_sample(checkpoint: Checkpoint, model: PreTrainedModel, sample: Sample) -> StoredSample:
    """The stored tensors of the sample's layers, numbered anew, and all tensors outside of layers; of tensors
    over the vocabulary only the sample's rows."""
    _, leaf, _ = _find_layers(model, model.config.get_text_config().num_hidden_layers)
    in_layer = re.compile(rf"(^|\.){re.escape(leaf)}\.(\d+)\.")
    names = WeightNames(model)
    quantization = quantization_of(checkpoint)
    parts = None
    if quantization is not None:
        parts = QuantizedParts(build_without_weights(checkpoint, torch.float32), quantization)
    vocabulary = {
        f"{name}.{kind}"
        for name, module in model.named_modules()
        for kind in ("weight", "bias")
        if module is model.get_input_embeddings() or module is model.get_output_embeddings()
    }
    found: dict[str, Tensor] = {}
    found_parts: dict[str, dict[str, Tensor]] = {}

    def renamed(name: str) -> str | None:
        """As in the model of the sample's layers only; None for another layer."""
        match = in_layer.search(name)
        if match is None:
            return name
        if int(match[2]) not in sample.layers:
            return None
        return f"{name[: match.start(2)]}{sample.layers.index(int(match[2]))}{name[match.end(2) :]}"

    for path in checkpoint.weight_files:
        with open_weights(path) as file:
            takers = names.takers(file.names)
            places = {} if parts is None else parts.of(file.names)
            for name in file.names:
                new_name = renamed(name)
                if new_name is None:
                    continue
                if name in places:
                    layer, part = places[name]
                    whole = file.read(name)
                    adapted = checkpoint.adapted(f"{layer}.weight", whole) if part == "weight" else whole
                    found_parts.setdefault(layer, {})[part] = adapted
                elif in_layer.search(name) is None and takers[name] & vocabulary:
                    found[new_name] = file.rows(name, sample.vocab_ids)
                    for taker in takers[name]:
                        found[new_name] = checkpoint.adapted(taker, found[new_name], sample.vocab_ids)
                else:
                    found[new_name] = file.read(name)
                    for taker in takers[name]:
                        found[new_name] = checkpoint.adapted(taker, found[new_name])
    rounded = {}
    for layer, of_layer in found_parts.items():
        assert parts is not None
        new_name = renamed(f"{layer}.weight")
        assert new_name is not None
        found[new_name] = parts.weight(layer, of_layer).dequantized(torch.float32)
        rounded[new_name.removesuffix(".weight")] = (parts.formats[layer], of_layer.get("input_scale"))
    return StoredSample(tensors=found, rounded=rounded)


def run_reference(
    model_class: type[PreTrainedModel],
    checkpoint: Checkpoint,
    sample: Sample,
    stored: StoredSample,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """Run the sample through a model of its layers and ids only, which transformers builds and loads."""
    config = copy.deepcopy(plain_config(checkpoint))
    text = config.get_text_config()
    for name, value in _layered(text, sample.layers).items():
        setattr(text, name, value)
    text.vocab_size = len(sample.vocab_ids)
    for each in (config, text):
        each.pad_token_id = None  # an id that the cut vocabulary may lack
    model, report = model_class.from_pretrained(
        None,
        config=config,
        state_dict=dict(stored.tensors),
        dtype=dtype,
        device_map={"": device},
        output_loading_info=True,
    )
    if report["missing_keys"]:
        raise ValueError(f"{sorted(report['missing_keys'])[0]} is missing")
    for name, (form, static) in stored.rounded.items():
        if form.activations is not None:
            scale = None if static is None else static.to(device, torch.float32)
            model.get_submodule(name).register_forward_pre_hook(partial(_round_inputs, form, scale))
    use_paged_attention(model)
    return run_sample(model.eval(), sample, token_ids=sample.tokens, device=device)


def _round_inputs(
    form: LayerFormat, static: Tensor | None, _: nn.Module, inputs: tuple[Tensor]
) -> tuple[Tensor]:
    x_TK = inputs[0].flatten(0, -2)
    scales = input_scales(form, x_TK, static)
    assert scales is not None
    return (rounded_values(form, x_TK, scales).view_as(inputs[0]),)


def _find_layers(model: PreTrainedModel, num_layers: int) -> tuple[nn.Module, str, nn.ModuleList]:
    """The list of decoder layers, the module that holds it, and its name there."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            owner, _, leaf = name.rpartition(".")
            return model.get_submodule(owner), leaf, module
    raise NotImplementedError(f"{type(model).__name__} has no list of {num_layers} layers")


def _layered(config: Any, layers: Sequence[int]) -> dict[str, Any]:
    """The values of a configuration that depend on its layers, cut to these layers."""
    num_layers = config.num_hidden_layers
    found = {
        name: [value[layer] for layer in layers]
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == num_layers
    }
    return {**found, "num_hidden_layers": len(layers)}
