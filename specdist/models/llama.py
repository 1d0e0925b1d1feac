"""The pass of a Llama-like model in few operations, without transformers' Python.

A pass of few tokens through a small model is bound by calling: of the 1.1 ms that a step of a draft with 2M
parameters takes in transformers, its products take 0.2. Here a layer is 20 operations instead of 43. Queries,
keys and values are one product, so are the two halves of a gated feed-forward part, and the weights are the
model's own: the packed matrices take the place of its parameters' memory.

What a model of another structure computes is not known here: :func:`specdist.models.llama_check.checked_pass`
compares the logits with those of transformers before a pass is used.

T flat tokens, N tokens whose logits are wanted, H heads, G key/value heads, D head width, E hidden size,
V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdist.models.attention import AttentionRules, LayerAttention

# Products of float32 with fewer multiply-adds take less time without oneDNN: see specdist.models.linear. On
# an AMD EPYC, from one token to 48, the two are equal at 0.8 to 1.2 million; with a copy of the weights in
# oneDNN's own layout at 0.4 to 0.6 million.
MIN_ONEDNN_PRODUCTS, MIN_COPIED_PRODUCTS = 2**20, 2**19
# The copy halves the time of a verification block: six tokens and a 1728 × 320 matrix take 42 microseconds
# instead of 73. Larger models do without: not every host has room for their weights twice.
MAX_COPIED_BYTES = 2**31
# A matrix that is too small for oneDNN even in such passes is not worth a copy.
MAX_COPIED_TOKENS = 16


class UnknownStructureError(Exception):
    """The model has parts that are not known here."""


class Product:
    """Linear layers of the same input as one matrix; their parameters become parts of it."""

    def __init__(self, *layers: nn.Module, is_copied: bool) -> None:
        """``is_copied``: keep a large float32 matrix on a CPU a second time, in oneDNN's layout."""
        # Not isinstance: a sharded, quantised or adapted layer computes something else from its weight.
        if any(type(layer) is not nn.Linear for layer in layers):
            raise UnknownStructureError("a layer that is not plainly linear")
        linears = cast("tuple[nn.Linear, ...]", layers)
        self._weight = _packed([layer.weight for layer in linears])
        biases: list[Tensor] = [layer.bias for layer in linears if layer.bias is not None]
        if biases and len(biases) < len(layers):
            raise UnknownStructureError("biases in some of the layers with the same input")
        self._bias = _packed(biases) if biases else None
        self._transposed = self._weight.t()
        has_onednn = (
            self._weight.device.type == "cpu"
            and self._weight.dtype == torch.float32
            and torch.backends.mkldnn.is_available()
        )
        least = MIN_COPIED_PRODUCTS if is_copied else MIN_ONEDNN_PRODUCTS
        self._min_onednn_tokens = least / self._weight.numel() if has_onednn else math.inf
        self._onednn_weight = self._weight
        if is_copied and self._min_onednn_tokens <= MAX_COPIED_TOKENS:
            with torch.no_grad():
                self._onednn_weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, None)

    def __call__(self, x_TE: Tensor, num_tokens: int) -> Tensor:
        if num_tokens >= self._min_onednn_tokens:
            output: Tensor = torch.ops.mkldnn._linear_pointwise(
                x_TE, self._onednn_weight, self._bias, "none", [], ""
            )
            return output
        if self._bias is None:
            return torch.mm(x_TE, self._transposed)
        return torch.addmm(self._bias, x_TE, self._transposed)


@torch.no_grad()
def _packed(parameters: Sequence[Tensor]) -> Tensor:
    """The parameters one after the other along their first dimension, in one piece of memory that they share.

    Packed once: a second runner of the same model finds them side by side.
    """
    if len(parameters) == 1:
        return parameters[0].detach()
    first, num_rows = parameters[0].detach(), sum(len(each) for each in parameters)
    address, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    for each in parameters:
        is_next = each.untyped_storage().data_ptr() == address and each.storage_offset() == offset
        if not (is_next and each.is_contiguous()):
            break
        offset += each.numel()
    else:
        return first.as_strided((num_rows, *first.shape[1:]), first.stride())
    with torch.inference_mode(False):
        packed = torch.cat([each.detach() for each in parameters])
        parts = packed.split([len(each) for each in parameters])
        for each, part in zip(parameters, parts, strict=True):
            each.data = part
    return packed


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """A layer's weights. Norms are the model's own functions; those after attention and the feed-forward part
    (Gemma 2) and those of queries and keys (Qwen 3) may be absent."""

    index: int
    rules: AttentionRules
    num_heads: int
    num_kv_heads: int
    width: int
    qkv: Product
    output: Product
    gate_up: Product
    down: Product
    activation: Callable[[Tensor], Tensor]
    norm_before_attention: Callable[[Tensor], Tensor]
    norm_after_attention: Callable[[Tensor], Tensor] | None
    norm_before_mlp: Callable[[Tensor], Tensor]
    norm_after_mlp: Callable[[Tensor], Tensor] | None
    query_norm: Callable[[Tensor], Tensor] | None
    key_norm: Callable[[Tensor], Tensor] | None

    def run(self, x_TE: Tensor, cosines_T1D: Tensor, sines_T1D: Tensor, attention: LayerAttention) -> Tensor:
        """The residual stream after this layer, in place."""
        num_tokens, num_heads = len(x_TE), self.num_heads
        heads_THD = self.qkv(self.norm_before_attention(x_TE), num_tokens).view(num_tokens, -1, self.width)
        num_rotated = num_heads + self.num_kv_heads
        rotated_THD, values_TGD = heads_THD[:, :num_rotated], heads_THD[:, num_rotated:]
        if self.query_norm is not None and self.key_norm is not None:
            queries_THD, keys_TGD = rotated_THD[:, :num_heads], rotated_THD[:, num_heads:]
            rotated_THD = torch.cat([self.query_norm(queries_THD), self.key_norm(keys_TGD)], dim=1)
        # The halves change places; the first half of the sines is negative. Roundings are those of
        # transformers, also in half precision.
        swapped_THD = rotated_THD.roll(self.width // 2, -1).mul_(sines_T1D)
        rotated_THD = (rotated_THD * cosines_T1D).add_(swapped_THD)
        attended_THD = attention.attend(
            self.index, rotated_THD[:, :num_heads], rotated_THD[:, num_heads:], values_TGD, self.rules
        )
        added_TE = self.output(attended_THD.reshape(num_tokens, -1), num_tokens)
        if self.norm_after_attention is not None:
            added_TE = self.norm_after_attention(added_TE)
        x_TE += added_TE
        gates, ups = self.gate_up(self.norm_before_mlp(x_TE), num_tokens).chunk(2, dim=-1)
        added_TE = self.down(self.activation(gates).mul_(ups), num_tokens)
        if self.norm_after_mlp is not None:
            added_TE = self.norm_after_mlp(added_TE)
        x_TE += added_TE
        return x_TE


class LlamaPass:
    """A pass of a model whose parts have the names and the order of those of Llama, Qwen, Mistral or Gemma.

    Raises :class:`UnknownStructureError` for other models.
    """

    def __init__(self, model: PreTrainedModel, rules: Mapping[int, AttentionRules]) -> None:
        """``rules``: of every layer's attention, as transformers hands them over."""
        self.rules = rules
        decoder = model.get_decoder()
        self._embed = part(decoder, "embed_tokens")
        self._rotary = part(decoder, "rotary_emb").forward
        self._norm = _norm(decoder, "norm")
        is_copied = sum(weight.nbytes for weight in model.parameters()) <= MAX_COPIED_BYTES
        self._head = model.get_output_embeddings()
        self._head_product = Product(self._head, is_copied=is_copied)
        self._softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        layers: Any = part(decoder, "layers")
        if len(layers) != len(rules):
            raise UnknownStructureError(f"{len(layers)} layers, and attention in {len(rules)}")
        self._layers = [_layer(layer, rules, is_copied=is_copied) for layer in layers]
        half = self._layers[0].width // 2
        self._signs_D = torch.ones(2 * half, dtype=model.dtype, device=model.device)
        self._signs_D[:half] = -1.0

    def __call__(
        self, token_ids_T: Tensor, positions_T: Tensor, logits_index_N: Tensor, attention: LayerAttention
    ) -> Tensor:
        """Logits [N, V]."""
        # A copy: the layers add to it in place.
        x_TE = self._embed.forward(token_ids_T)
        cosines, sines = self._rotary(x_TE, position_ids=positions_T[None])
        cosines_T1D, sines_T1D = cosines[0][:, None], (sines[0] * self._signs_D)[:, None]
        for layer in self._layers:
            x_TE = layer.run(x_TE, cosines_T1D, sines_T1D, attention)
        hidden_NE = self._norm(x_TE[logits_index_N])
        if self._head._forward_pre_hooks:
            # They read its input, which has a leading dimension as in transformers.
            logits: Tensor = self._head(hidden_NE[None])[0]
        else:
            logits = self._head_product(hidden_NE, len(hidden_NE))
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits


def _layer(layer: nn.Module, rules: Mapping[int, AttentionRules], *, is_copied: bool) -> _Layer:
    attention, mlp = part(layer, "self_attn"), part(layer, "mlp")
    known = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    has_norms_after = hasattr(layer, "post_feedforward_layernorm")
    if has_norms_after:
        known |= {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
    check_parts(layer, known)
    check_parts(attention, {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"})
    check_parts(mlp, {"gate_proj", "up_proj", "down_proj", "act_fn"})
    index, width = int(attention.layer_idx), int(attention.head_dim)  # type: ignore[arg-type]
    queries, keys, values = (part(attention, name) for name in ("q_proj", "k_proj", "v_proj"))
    product = partial(Product, is_copied=is_copied)
    has_head_norms = hasattr(attention, "q_norm")
    return _Layer(
        index=index,
        rules=rules[index],
        num_heads=int(queries.out_features) // width,  # type: ignore[arg-type]
        num_kv_heads=int(keys.out_features) // width,  # type: ignore[arg-type]
        width=width,
        qkv=product(queries, keys, values),
        output=product(part(attention, "o_proj")),
        gate_up=product(part(mlp, "gate_proj"), part(mlp, "up_proj")),
        down=product(part(mlp, "down_proj")),
        activation=part(mlp, "act_fn").forward,
        norm_before_attention=_norm(layer, "input_layernorm"),
        norm_after_attention=_norm(layer, "post_attention_layernorm") if has_norms_after else None,
        norm_before_mlp=_norm(
            layer, "pre_feedforward_layernorm" if has_norms_after else "post_attention_layernorm"
        ),
        norm_after_mlp=_norm(layer, "post_feedforward_layernorm") if has_norms_after else None,
        query_norm=_norm(attention, "q_norm") if has_head_norms else None,
        key_norm=_norm(attention, "k_norm") if has_head_norms else None,
    )


def part(module: nn.Module, name: str) -> nn.Module:
    part = getattr(module, name, None)
    if not isinstance(part, nn.Module):
        raise UnknownStructureError(f"{type(module).__name__} has no {name}")
    return part


def _norm(module: nn.Module, name: str) -> Callable[[Tensor], Tensor]:
    """The module's own function, or in float32 the same as one call, for the norms of Llama's kind."""
    norm = part(module, name)
    epsilon, weight = getattr(norm, "variance_epsilon", None), getattr(norm, "weight", None)
    if isinstance(epsilon, float) and isinstance(weight, Tensor) and weight.dtype == torch.float32:
        return partial(F.rms_norm, normalized_shape=tuple(weight.shape), weight=weight, eps=epsilon)
    return norm.forward


def check_parts(module: nn.Module, known: set[str]) -> None:
    """Raises for parts that would be left out."""
    unknown = {name for name, _ in module.named_children()} - known
    if unknown:
        raise UnknownStructureError(f"{type(module).__name__} has {', '.join(sorted(unknown))}")
