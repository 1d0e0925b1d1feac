"""Quantised models: how each layer of a checkpoint is stored, what is quantised while it is loaded, and what
is refused by name before anything is loaded.

A quantised weight is a matrix of small numbers with scales. Read without its scales it is another matrix,
and the model still answers. Four layouts are read (``quant_method`` in config.json): ``compressed-tensors``
(FP8, INT8, INT4 or INT8 packed in groups, MXFP4 and NVFP4), ``modelopt``'s FP8 and NVFP4, gpt-oss's experts
in ``mxfp4``, and transformers' block-wise ``fp8``, as in DeepSeek's models. Of that transformers on a CPU,
and this package everywhere, rounds no inputs; nor does it round any to four bits.
"""

from __future__ import annotations

import copy
import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from specdist.models.files.checkpoint import Checkpoint
from specdist.models.files.damage import reading
from specdist.models.quantized.quantized_weights import GlobalScale, LayerFormat, Numbers
from specdist.utils.errors import UserError
from specdist.utils.json_values import parse_object

CONFIG_KEY = "quantization_config"
# Where other tools declare their quantisation: AutoGPTQ, AutoAWQ, NVIDIA's ModelOpt.
MODELOPT_FILE = "hf_quant_config.json"
SCHEME_FILES = ("quantize_config.json", "quant_config.json", MODELOPT_FILE)
BLOCK_FP8, COMPRESSED, MXFP4, MODELOPT, NVFP4 = "fp8", "compressed-tensors", "mxfp4", "modelopt", "NVFP4"
MODELOPT_FORMATS = {
    "FP8": LayerFormat(numbers="float8", rows=None, columns=None, activations="static"),
    NVFP4: LayerFormat(numbers="float4", rows=1, columns=16, global_name="weight_scale_2"),
}
MXFP4_FORMAT = LayerFormat(numbers="float4", rows=1, columns=32, has_powers=True)
QUANTISED_NAMES = ("scale", "zero_point", "zeros", "qweight", "g_idx", "absmax", "quant_state", "packed")
UNQUANTISED = "name the unquantised checkpoint that it was made from"
# A group of columns of int4: the first that divides the inputs. Others are left as they are.
INT4_GROUPS = (64, 32)
PACKED_FORMAT = "pack-quantized"
# Formats of four bits: the strategy, numbers of a scale, and the scale of all of these.
FLOAT4_FORMATS: dict[str, tuple[str, int, GlobalScale | None]] = {
    "nvfp4-pack-quantized": ("tensor_group", 16, "weight_global_scale"),
    "mxfp4-pack-quantized": ("group", 32, None),
}
FORMATS = {
    ("float", 8): ("float-quantized", "naive-quantized"),
    ("int", 8): ("int-quantized", "naive-quantized", PACKED_FORMAT),
    ("int", 4): (PACKED_FORMAT,),
    ("float", 4): tuple(FLOAT4_FORMATS),
}


@dataclass(frozen=True)
class Scheme:
    """A declared quantisation: its method's name, the file that declares it, and what that says."""

    method: str
    file_name: str
    declared: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """The formats of a model's linear layers.

    Attributes:
        groups: names of layers, regular expressions after ``re:``, or ``Linear``, with their format.
        ignored: layers that are not quantised.
        request: the option's value, if the checkpoint is to be quantised while it is loaded.
        has_mxfp4_experts: joined experts are MXFP4, and nothing else in the files is quantised.
    """

    groups: tuple[tuple[tuple[str, ...], LayerFormat], ...] = ()
    ignored: tuple[str, ...] = ()
    request: str | None = None
    has_mxfp4_experts: bool = False

    @property
    def rounds_inputs(self) -> bool:
        """Whether the inputs of any layers are rounded to 8 bits."""
        forms: list[LayerFormat | None] = [form for _, form in self.groups]
        if self.request is not None:
            forms = [requested_format(self.request, INT4_GROUPS[0])]
        return any(form is not None and form.activations is not None for form in forms)

    def format_of(self, name: str, num_inputs: int) -> LayerFormat | None:
        """The format of a linear layer in memory; None for a plain one."""
        if self.request is not None:
            return requested_format(self.request, num_inputs)
        return self._declared_format(name)

    def stored_format_of(self, name: str) -> LayerFormat | None:
        """The format of a linear layer in the files."""
        return None if self.request is not None else self._declared_format(name)

    def format_of_experts(self, name: str) -> LayerFormat | None:
        """The format of joined experts, as far as the name of one in files tells; None for plain ones."""
        if self.has_mxfp4_experts:
            return MXFP4_FORMAT
        return None if self.request is not None else self._declared_format(f"{name}.0.gate_proj")

    def _declared_format(self, name: str) -> LayerFormat | None:
        if any(_matches(name, each) for each in self.ignored):
            return None
        for targets, form in self.groups:
            if any(_matches(name, each) for each in targets):
                return form
        return None


def requested_format(request: str, num_inputs: int) -> LayerFormat | None:
    """The format of ``--target_quantization`` and ``--draft_quantization``; None for a layer that keeps its
    numbers."""
    if request == "int4":
        columns = next((group for group in INT4_GROUPS if num_inputs % group == 0), None)
        if columns is None:
            return None
        return LayerFormat(numbers="int4", rows=1, columns=columns, has_zeros=True)
    assert request in ("int8", "float8")
    numbers: Numbers = "int8" if request == "int8" else "float8"
    return LayerFormat(numbers=numbers, rows=1, columns=None, activations="token")


def quantization_of(checkpoint: Checkpoint) -> Quantization | None:
    """How the model's layers are quantised in memory. Raises :class:`UserError` for what is not supported."""
    scheme = declared_scheme(checkpoint)
    if scheme is None:
        return None if checkpoint.quantization is None else Quantization(request=checkpoint.quantization)
    what = (
        f"{checkpoint.option} {checkpoint.name} is quantised ({scheme.file_name} declares "
        f"{scheme.method}), which specdist"
    )
    readers = {BLOCK_FP8: _block_fp8, COMPRESSED: _compressed, MXFP4: _mxfp4, MODELOPT: _modelopt}
    if scheme.file_name != "config.json":
        readers = dict.fromkeys(MODELOPT_FORMATS, _modelopt) if scheme.file_name == MODELOPT_FILE else {}
    if scheme.method not in readers:
        raise UserError(f"{what} does not read: {UNQUANTISED}")
    found = readers[scheme.method](what, scheme.declared)
    if checkpoint.quantization is not None:
        name = f"{checkpoint.option}_quantization {checkpoint.quantization}"
        raise UserError(
            f"{name} is for checkpoints that are not quantised, and {checkpoint.option} {checkpoint.name} is "
            f"({checkpoint.folder.name}/config.json declares it): leave {checkpoint.option}_quantization out"
        )
    return found


def declared_scheme(checkpoint: Checkpoint) -> Scheme | None:
    """The quantisation that the folder declares, if any."""
    declared = _declared_config(checkpoint)
    if declared is not None:
        return Scheme(str(declared.get("quant_method", "unnamed")), "config.json", declared)
    for name in SCHEME_FILES:
        path = checkpoint.folder / name
        if path.is_file():
            with reading(f"{checkpoint.option} {checkpoint.name}: {name}"):
                values = parse_object(path.read_bytes())
            nested = values.get("quantization")
            named = {**values, **(nested if isinstance(nested, dict) else {})}
            method = next((named[key] for key in ("quant_method", "quant_algo") if named.get(key)), None)
            if method is None and "bits" not in named and "w_bit" not in named:
                continue  # ModelOpt also writes its file for models that it has not quantised
            return Scheme(str(method or "unnamed"), name, named)
    return None


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers that may be quantised, by name: all but the output head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head
    }


def looks_quantised(stored_name: str) -> bool:
    """Whether the last part of a tensor's name is typical of quantised checkpoints."""
    leaf = stored_name.rpartition(".")[2]
    return any(word in leaf for word in QUANTISED_NAMES)


def plain_config(checkpoint: Checkpoint) -> Any:
    """The configuration without its quantisation: transformers then builds plain layers."""
    if _declared_config(checkpoint) is None:
        return checkpoint.config
    config = copy.deepcopy(checkpoint.config)
    for each in (config, config.get_text_config()):
        if hasattr(each, CONFIG_KEY):
            delattr(each, CONFIG_KEY)
    return config


def _block_fp8(what: str, declared: Mapping[str, Any]) -> Quantization:
    """transformers' FineGrainedFP8Config."""
    block = declared.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or declared.get("expert_dtype", "fp8") != "fp8":
        raise UserError(f"{what} reads with weight_block_size and FP8 weights only: {UNQUANTISED}")
    form = LayerFormat(numbers="float8", rows=block[0], columns=block[1], scale_name="weight_scale_inv")
    patterns = tuple(f"convert:{each}" for each in declared.get("modules_to_not_convert") or ())
    return Quantization(groups=((("Linear",), form),), ignored=patterns)


def _mxfp4(what: str, declared: Mapping[str, Any]) -> Quantization:
    """transformers' Mxfp4Config, of which gpt-oss has nothing but the layers that are left as they are."""
    del what, declared
    return Quantization(has_mxfp4_experts=True)


def _modelopt(what: str, declared: Mapping[str, Any]) -> Quantization:
    """NVIDIA ModelOpt's FP8 with static inputs, and NVFP4. The weights are the same without the scales of an
    FP8 cache that they may come with."""
    scheme = declared.get("kv_cache_scheme") or {}
    is_known = not scheme or (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    for key, is_read in (
        ("quant_algo", declared.get("quant_algo") in MODELOPT_FORMATS),
        ("group_size", declared.get("group_size") in (None, 16)),
        ("kv_cache_quant_algo", declared.get("kv_cache_quant_algo") in (None, "FP8")),
        ("kv_cache_scheme", is_known),
    ):
        if not is_read:
            raise UserError(f"{what} does not read with {key} {declared.get(key)!r}: {UNQUANTISED}")
    form = MODELOPT_FORMATS[declared["quant_algo"]]
    excluded = declared.get("exclude_modules") or declared.get("ignore") or ()
    patterns = tuple(f"re:{fnmatch.translate(each)}" for each in excluded)
    return Quantization(groups=((("Linear",), form),), ignored=patterns)


def _compressed(what: str, declared: Mapping[str, Any]) -> Quantization:
    """compressed-tensors' QuantizationConfig."""

    def refuse(key: str, value: object) -> None:
        raise UserError(f"{what} does not read with {key} {value!r}: {UNQUANTISED}")

    sparsity = declared.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        refuse("sparsity_config.format", sparsity["format"])
    for key in ("kv_cache_scheme", "transform_config"):
        if declared.get(key):
            refuse(key, declared[key])
    if declared.get("quantization_status", "compressed") != "compressed":
        refuse("quantization_status", declared["quantization_status"])
    groups = declared.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(each, dict) for each in groups.values()):
        refuse("config_groups", groups)
    assert isinstance(groups, dict)
    found = []
    for name, group in groups.items():
        form = group.get("format") or declared.get("format")
        layer = _compressed_layer(group, form)
        if isinstance(layer, str):
            raise UserError(f"{what} does not read: {name} has {layer}; {UNQUANTISED}")
        found.append((tuple(group.get("targets") or ()), layer))
    return Quantization(groups=tuple(found), ignored=tuple(declared.get("ignore") or ()))


def _compressed_layer(group: Mapping[str, Any], form: Any) -> LayerFormat | str:
    """The format of a group of layers, or what of it is not supported."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    if form not in FORMATS.get((kind, bits), ()):
        return f"{bits}-bit {kind} weights in format {form}"
    strategy = weights.get("strategy")
    columns = weights.get("group_size") or 0
    strategy = strategy or ("group" if columns > 0 else "channel" if columns == -1 else "tensor")
    block = weights.get("block_structure") or [0, 0]
    shared = {
        "tensor": (None, None), "channel": (1, None), "group": (1, columns), "tensor_group": (1, columns),
        "block": tuple(block),
    }.get(strategy)  # fmt: skip
    if shared is None or not all(each is None or (isinstance(each, int) and each > 0) for each in shared):
        return f"weights with strategy {strategy}, group_size {columns}, block_structure {block}"
    # The columns may be in another order; "weight" and "static" are another order during calibration only.
    if weights.get("actorder") not in (None, False, "weight", "static"):
        return f"weights with actorder {weights['actorder']}"
    if weights.get("dynamic"):
        return f"weights with dynamic {weights['dynamic']}"
    is_symmetric = weights.get("symmetric", True)
    if kind == "float" and not is_symmetric:
        return "float weights that are not symmetric"
    if group.get("output_activations"):
        return "output_activations"
    if form in FLOAT4_FORMATS:
        of_group, size, global_name = FLOAT4_FORMATS[form]
        if (strategy, columns) != (of_group, size):
            return f"weights with strategy {strategy}, group_size {columns}"
        return LayerFormat(
            numbers="float4",
            rows=1,
            columns=columns,
            is_packed=True,
            has_powers=global_name is None,
            global_name=global_name,
        )
    activations = None
    if inputs:
        activations = _activations(inputs, kind, columns if strategy == "group" else block[1])
        if activations is None or bits == 4:
            return (
                f"input_activations {dict(inputs)}" + ", whose scale depends on the other tokens of a pass"
                if inputs.get("dynamic") and inputs.get("strategy") == "tensor"
                else f"input_activations {dict(inputs)} with {bits}-bit {kind} weights"
            )
    return LayerFormat(
        numbers="float8" if kind == "float" else "int8" if bits == 8 else "int4",
        rows=shared[0],
        columns=shared[1],
        is_packed=form == PACKED_FORMAT,
        has_zeros=not is_symmetric,
        activations=activations,  # type: ignore[arg-type]
    )


def _activations(inputs: Mapping[str, Any], kind: str, columns: int) -> str | None:
    """How inputs are rounded; None if that is not supported."""
    is_known = inputs.get("num_bits", 8) == 8 and inputs.get("type", "int") == kind
    if not is_known or not inputs.get("symmetric", True):
        return None
    strategy = inputs.get("strategy") or "tensor"
    if inputs.get("dynamic") is True:
        if strategy == "group" and inputs.get("group_size") == columns > 0:
            return "group"
        return "token" if strategy == "token" else None
    return "static" if strategy == "tensor" and not inputs.get("dynamic") else None


def _matches(name: str, target: str) -> bool:
    """Whether a linear layer is one of those that compressed-tensors, or after ``convert:`` transformers'
    ``modules_to_not_convert``, names."""
    if target.startswith("convert:"):
        pattern = target.removeprefix("convert:")
        at_border = re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", name)
        return at_border is not None or name.endswith(pattern)
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), name) is not None
    return target in (name, "Linear")


def _declared_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    for config in (checkpoint.config, checkpoint.config.get_text_config()):
        declared = getattr(config, CONFIG_KEY, None)
        if declared:
            return declared if isinstance(declared, dict) else declared.to_dict()
    return None
