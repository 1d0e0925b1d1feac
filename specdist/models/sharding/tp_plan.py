"""How each part of a model is cut over ranks, after transformers' own plan (``base_model_tp_plan``).

The plan names modules and bare parameters; what it does not name is whole on every rank. Where transformers
gathers what it has cut, since the model's code slices joined projections or norms all heads together, this
package cuts each part by itself instead, so that a rank holds the keys and values of its own heads alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specdist.models.families.computed import build_without_weights
from specdist.models.files.checkpoint import Checkpoint, kv_heads_of
from specdist.models.recurrent.cuts import COLWISE, NORM, PACKED, ROWWISE, PlannedCut
from specdist.models.recurrent.kinds import mixers_of
from specdist.models.sharding.experts import experts_of
from specdist.utils.errors import UserError

EXPERTS = "moe_tp_experts"
# Whole on every rank, but for what experts have within.
WHOLE = {
    EXPERTS, "moe_identity_expert", "replicated_with_grad_allreduce", "replicate", "embedding_rowwise",
    "embedding_colwise", "mla_kv_a_proj", "local_params",
}  # fmt: skip
# Styles by the last part of the name: what transformers gathers (``colwise_gather_output``), and its
# counterpart (``rowwise_split_input``). Others are not worth a sum over the ranks.
GATHERED = {
    "q_proj": COLWISE, "k_proj": COLWISE, "v_proj": COLWISE, "qkv_proj": PACKED, "gate_up_proj": PACKED,
}  # fmt: skip
SPLIT = {"o_proj": ROWWISE, "down_proj": ROWWISE}
REPLACED = {"colwise_gather_output": GATHERED, "colwise_rep": GATHERED, "rowwise_split_input": SPLIT}
NORMED = {"q_norm": "q_proj", "k_norm": "k_proj"}

# Before an all-reduce in families without a plan; their bias is whole on every rank.
SUMMED = ("o_proj", "down_proj", "dense_4h_to_h", "attention.dense", "self_attn.dense", "fc2")
# Attention has one of them.
OF_HEADS = ("head_dim", "head_size", "num_heads", "num_attention_heads")
KEYS_VALUES = {"k_proj", "v_proj", "k_norm"}
# What names of joined projections have.
QUERIES_TOO = r"qkv|c_attn"

# Output projections of attention and feed-forward parts, and what is cut before them: plans leave some out.
BEFORE = {
    "o_proj": {
        **dict.fromkeys(
            ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "g_proj"), COLWISE
        ),
        "sinks": COLWISE,
    },
    "down_proj": {"gate_proj": COLWISE, "up_proj": COLWISE, "gate_up_proj": PACKED},
}
# Without projections of recurrent layers, whose cut their kind tells.
LFM2 = {
    **dict.fromkeys((f"layers.*.self_attn.{name}_proj" for name in "qkv"), COLWISE),
    "layers.*.self_attn.out_proj": ROWWISE,
    "layers.*.feed_forward.w1": COLWISE, "layers.*.feed_forward.w3": COLWISE,
    "layers.*.feed_forward.w2": ROWWISE,
}  # fmt: skip
GPT2 = {
    "h.*.attn.c_attn": PACKED, "h.*.attn.c_proj": ROWWISE,
    "h.*.mlp.c_fc": COLWISE, "h.*.mlp.c_proj": ROWWISE,
}  # fmt: skip
LLAMA = {
    **dict.fromkeys((f"layers.*.self_attn.{name}_proj" for name in "qkv"), COLWISE),
    "layers.*.self_attn.o_proj": ROWWISE,
    "layers.*.feed_forward.gate_proj": COLWISE, "layers.*.feed_forward.up_proj": COLWISE,
    "layers.*.feed_forward.down_proj": ROWWISE,
}  # fmt: skip
# Plans of families for which transformers has none, or not all of it, and DeepSpeed's rules by name do not
# fit.
PLANS: dict[str, dict[str, str]] = {
    "bitnet": {"layers.*.self_attn.attn_sub_norm": NORM, "layers.*.mlp.ffn_sub_norm": NORM},
    "persimmon": {
        "layers.*.self_attn.query_key_value": COLWISE, "layers.*.self_attn.dense": ROWWISE,
        "layers.*.mlp.dense_h_to_4h": COLWISE, "layers.*.mlp.dense_4h_to_h": ROWWISE,
    },
    "granitemoeshared": {
        "layers.*.shared_mlp.input_linear": PACKED, "layers.*.shared_mlp.output_linear": ROWWISE,
    },
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), LFM2),
    **dict.fromkeys(("bamba", "falcon_h1"), LLAMA),
    "gpt_oss": {"layers.*.mlp.experts": EXPERTS},
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "modernbert-decoder": {
        **{f"layers.*.attn.{name}_proj": COLWISE for name in "qkv"}, "layers.*.attn.Wo": ROWWISE,
        "layers.*.mlp.Wi": PACKED, "layers.*.mlp.Wo": ROWWISE,
    },
    "ctrl": {
        **{f"h.*.multi_head_attention.W{name}": COLWISE for name in "qkv"},
        "h.*.multi_head_attention.dense": ROWWISE, "h.*.ffn.0": COLWISE, "h.*.ffn.2": ROWWISE,
    },
}  # fmt: skip


def planned_cuts(model: PreTrainedModel) -> dict[str, PlannedCut]:
    """The cut of every module and bare parameter that the plan names, by its name in the whole model; empty
    for a model without a plan. The output head, which is cut along the vocabulary, is left out.
    """
    plan = {**(model._tp_plan or {}), **_own_plans(model)}
    head = model.get_output_embeddings()
    modules = {name: module for name, module in model.named_modules() if module is not head}
    styles: dict[str, str] = {}
    for name in (*modules, *(name for name, _ in model.named_parameters())):
        style = plan.get(re.sub(r"\.\d+(\.|$)", r".*\1", name))
        if style in REPLACED:
            style = REPLACED[style].get(_last(name))
        if style is not None and (name in modules or name.rpartition(".")[0] in modules):
            styles[name] = style
    styles |= _unnamed(modules, styles)
    for name, module in modules.items():
        projection = f"{name.rpartition('.')[0]}.{NORMED.get(_last(name))}"
        # One that norms each head by itself is narrower, and whole on every rank.
        if styles.get(projection) == COLWISE and _width(module) == _width(modules[projection]):
            styles[name] = NORM
    num_kv_heads = kv_heads_of(model.config.get_text_config())
    found = {}
    for name, style in styles.items():
        owner = modules.get(name.rpartition(".")[0])
        parts = _joined(name, modules, styles) if style == PACKED and name in modules else ()
        is_of_heads = any(hasattr(owner, count) for count in OF_HEADS)
        num_own = 0
        if is_of_heads and (_last(name) in KEYS_VALUES or len(parts) == 3):
            head_width = getattr(owner, "head_dim", None)
            # Values have as many heads as keys, perhaps of another width.
            keys = getattr(owner, "k_proj", None) or modules[name]
            width = parts[1] if parts else _width(keys)
            # Layers may differ.
            num_own = num_kv_heads if head_width is None else width // head_width
        found[name] = PlannedCut(style, parts, is_of_heads, num_own)
    for name, mixer in mixers_of(model).items():
        found |= {f"{name}.{part}": replace(cut, is_of_heads=True) for part, cut in mixer.cuts.items()}
    return found


def check_heads(checkpoint: Checkpoint, tp_size: int) -> None:
    """Raises :class:`UserError` for a model whose attention heads so many ranks cannot share out."""
    config = checkpoint.config.get_text_config()
    if not _shares_heads(config, tp_size):
        size = largest_size(checkpoint, tp_size)
        raise UserError(
            f"--tp_size {tp_size} must divide the attention heads ({config.num_attention_heads}) of "
            f"{checkpoint.option} {checkpoint.name}, and divide its key/value heads ({kv_heads_of(config)}) "
            f"or be a multiple of them: use --tp_size {size}"
        )


def _shares_heads(config: Any, size: int) -> bool:
    num_heads, num_kv_heads = getattr(config, "num_attention_heads", 0) or 0, kv_heads_of(config)
    return not (num_heads % size or (num_kv_heads % size and size % num_kv_heads))


def largest_size(checkpoint: Checkpoint, below: int) -> int:
    """The largest ``--tp_size`` below this one that heads, pieces of recurrent layers and inner widths of
    experts allow, for a message; 1 where they allow this one, and something else does not."""
    model = build_without_weights(checkpoint, torch.float32)
    text, cuts = model.config.get_text_config(), planned_cuts(model).values()
    wholes = [mixer.num_pieces for mixer in mixers_of(model).values()]
    for _, module in experts_of(model):
        if (weight := module._parameters.get("down_proj")) is not None:
            wholes.append(weight.shape[1 if module.is_transposed else 2])
    kv_counts = {cut.num_kv_heads for cut in cuts} - {0}

    def fits(size: int) -> bool:
        has_own_keys = all(count % size == 0 or size % count == 0 for count in kv_counts)
        return has_own_keys and _shares_heads(text, size) and not any(whole % size for whole in wholes)

    if fits(below) or not cuts:  # what DeepSpeed makes of a model without a plan is not known before
        return 1
    return next(size for size in range(below - 1, 0, -1) if fits(size))


def _unnamed(modules: Mapping[str, nn.Module], styles: Mapping[str, str]) -> dict[str, str]:
    """What a plan leaves out of attention and feed-forward parts, shared experts among them."""
    # The layers of towers for images have no index.
    layers = tuple(
        f"{name.rpartition('.')[0]}."
        for name, module in modules.items()
        if getattr(module, "layer_idx", None) is not None
    )
    experts = tuple(f"{name}." for name, style in styles.items() if style == EXPERTS)
    found: dict[str, str] = {}
    for name, module in modules.items():
        owner, _, last = name.rpartition(".")
        if last not in BEFORE or not isinstance(module, nn.Linear):
            continue
        if name.startswith(layers) and not name.startswith(experts):
            parts = {*modules[owner]._modules, *modules[owner]._parameters} & {*BEFORE[last]}
            found |= {name: ROWWISE} | {f"{owner}.{part}": BEFORE[last][part] for part in parts}
    return {name: style for name, style in found.items() if name not in styles}


def _own_plans(model: PreTrainedModel) -> dict[str, str]:
    """The styles of :data:`PLANS` for the model or one within it."""
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and module.base_model is module:
            # The projections of gpt_bigcode are joined head by head, if each head has its own keys.
            is_known = getattr(module.config, "multi_query", True)
            found = PLANS.get(module.config.model_type, {}) if is_known else {}
            plan |= {f"{name}.{pattern}".removeprefix("."): style for pattern, style in found.items()}
    return plan


def _joined(name: str, modules: Mapping[str, nn.Module], styles: Mapping[str, str]) -> tuple[int, ...]:
    """Widths of queries, keys and values, or of the two halves of a gated feed-forward part."""
    owner = name.rpartition(".")[0]
    takers = [
        other for other, style in styles.items() if style == ROWWISE and other.rpartition(".")[0] == owner
    ]
    if len(takers) != 1:
        return ()  # how it is joined is not known
    taker, joined = modules[takers[0]], modules[name]
    width, left = _inputs(taker), _width(joined) - _inputs(taker)
    return (width, left // 2, left // 2) if re.search(QUERIES_TOO, _last(name)) else (width, left)


def _width(module: nn.Module) -> int:
    """Outputs of a linear layer, numbers of a norm."""
    weight = getattr(module, "weight", None)
    if isinstance(module, Conv1D):
        return module.nf
    return len(weight) if isinstance(weight, Tensor) else 0


def _inputs(module: nn.Module) -> int:
    if isinstance(module, Conv1D):
        return module.nx
    assert isinstance(module, nn.Linear)
    return module.in_features


def _last(name: str) -> str:
    return name.rpartition(".")[2]
