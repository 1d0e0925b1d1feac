"""The pass of a Llama-like model as one call of compiled code: see ``specdist/kernels/cpu_pass.c``.

A token's logits are the same bits whatever else is in the pass. In bfloat16 only weights, inputs of products,
keys and values are rounded, sums and residuals stay float32.

What a model of another structure computes is not known here: :mod:`specdist.models.passes.compiled_check`
compares the logits with those of transformers before a pass is used.

T flat tokens, N tokens whose logits are wanted, E hidden size, D head width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdist.kernels import cpu_library
from specdist.models.attention.attention import AttentionRules
from specdist.models.attention.kernel import PagedKernel
from specdist.models.batch.flat import FlatBatch, PassOutputs
from specdist.models.cache.key_value import KeyValueCache

# Frequencies that depend neither on the length of a text nor on anything else of a pass.
ROTATIONS = ("default", "linear", "llama3", "yarn")
DTYPES = (torch.float32, torch.bfloat16)
# The code reads so many numbers of a head at once, and pairs of a product's inputs.
HEAD_MULTIPLE, INPUT_MULTIPLE = 8, 2
# Not every host has room for the weights of larger models twice.
MAX_COPIED_BYTES = 2**31
# Where large pages of memory begin.
HUGE_PAGE = 2**21


class UnknownStructureError(ValueError):
    """The model has parts that are not known here."""


class CompiledPass:
    """Raises :class:`UnknownStructureError` for models that are not like Llama or too large to be copied, and
    what :func:`specdist.kernels.cpu_library.library` raises where it cannot be compiled."""

    def __init__(self, model: PreTrainedModel, rules: Mapping[int, AttentionRules]) -> None:
        if model.dtype not in DTYPES or sum(each.nbytes for each in model.parameters()) > MAX_COPIED_BYTES:
            raise UnknownStructureError("weights that are too large to be copied, or of another type")
        self._library = cpu_library.library()
        self._dtype = model.dtype
        self._vocab_size = model.get_output_embeddings().out_features
        self._kept: list[Tensor] = []  # what addresses point at
        self._shapes: tuple[int, int, int] | None = None
        decoder = model.get_decoder()
        layers: Any = part(decoder, "layers")
        config = model.config.get_text_config()
        if len(layers) != len(rules) or getattr(config, "final_logit_softcapping", None) is not None:
            raise UnknownStructureError("layers without attention, or a soft cap")
        self._layers = (cpu_library.Layer * len(layers))()
        for item, layer in zip(self._layers, layers, strict=True):
            self._fill(item, layer, rules)
        width, num_heads, num_kv_heads = self._shapes or (0, 0, 0)
        embeddings, rotary = part(decoder, "embed_tokens"), part(decoder, "rotary_emb")
        if type(embeddings) is not nn.Embedding or getattr(rotary, "rope_type", "") not in ROTATIONS:
            raise UnknownStructureError("embeddings or a rotation of an unknown kind")
        self._rotary = rotary.forward
        self._cosines = self._sines = torch.empty(0, width)
        norm = part(decoder, "norm")
        self._model = cpu_library.Model(
            num_layers=len(layers),
            hidden_size=embeddings.embedding_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_width=width,
            mlp_size=self._layers[0].down.num_inputs,
            is_half=self._dtype == torch.bfloat16,
            epsilon=_epsilon(norm),
            head_epsilon=_epsilon(getattr(layers[0].self_attn, "q_norm", norm)),
            layers=ctypes.addressof(self._layers),
            final_norm=self._norm(norm),
            embeddings=self._address(embeddings.weight),
            head=self._product(model.get_output_embeddings()),
        )
        self._workspace = torch.empty(0)

    def bind(self, cache: KeyValueCache, kernel: PagedKernel | None) -> None:
        """Write keys and values into this cache from now on; the attention is its own."""
        del kernel
        self._model.page_size = cache.page_size
        for index, layer in enumerate(self._layers):
            layer.keys, layer.values = cache.keys[index].data_ptr(), cache.values[index].data_ptr()
            layer.group = int(index in cache.windowed)

    def run(
        self, batch: FlatBatch, pages_SP: np.ndarray, asked_N: np.ndarray, *, with_hidden: bool = False
    ) -> PassOutputs:
        """Hidden states are always among what it computes."""
        del with_hidden
        num_tokens, num_logits = len(batch), len(asked_N)
        token_ids_T = torch.as_tensor(batch.token_ids_T, dtype=torch.int64).contiguous()
        of_tokens = (batch.slots_T, batch.positions_T, batch.model_positions_T)
        indices = [np.ascontiguousarray(each, np.int64) for each in of_tokens]
        asked_N = np.ascontiguousarray(asked_N, np.int64)
        windowed_SP = pages_SP if batch.windowed_pages_SP is None else batch.windowed_pages_SP
        table, windowed_table = (np.ascontiguousarray(each, np.int32) for each in (pages_SP, windowed_SP))
        self._extend_rotation(int(batch.model_positions_T.max()) + 1)
        logits = torch.empty(num_logits, self._vocab_size, dtype=self._dtype)
        hidden_NE = torch.empty(num_logits, self._model.hidden_size, dtype=self._dtype)
        model = ctypes.byref(self._model)
        num_numbers = self._library.num_workspace_numbers(model, ctypes.c_int64(num_tokens))
        if self._workspace.numel() < num_numbers:
            self._workspace = torch.empty(num_numbers)
        self._model.num_threads = torch.get_num_threads()
        arguments = cpu_library.Batch(
            num_tokens=num_tokens,
            num_logits=num_logits,
            table_width=table.shape[1],
            token_ids=token_ids_T.data_ptr(),
            slots=indices[0].ctypes.data,
            positions=indices[1].ctypes.data,
            rotations=indices[2].ctypes.data,
            logits_index=asked_N.ctypes.data,
            page_table=table.ctypes.data,
            windowed_page_table=windowed_table.ctypes.data,
            cosines=self._cosines.data_ptr(),
            sines=self._sines.data_ptr(),
            hidden=hidden_NE.data_ptr(),
            logits=logits.data_ptr(),
            workspace=self._workspace.data_ptr(),
        )
        self._library.run_pass(model, ctypes.byref(arguments))
        return PassOutputs(logits, hidden_NE)

    def _extend_rotation(self, num_positions: int) -> None:
        """Cosines and sines of the first positions, as transformers computes them."""
        if num_positions <= len(self._cosines):
            return
        positions = torch.arange(max(num_positions, 2 * len(self._cosines)))[None]
        cosines, sines = self._rotary(torch.empty(1, 1, 1, dtype=self._dtype), position_ids=positions)
        if cosines.shape[-1] != self._model.head_width:
            raise UnknownStructureError("a rotation of a part of each head")
        self._cosines, self._sines = cosines[0].contiguous(), sines[0].contiguous()

    def _fill(self, item: cpu_library.Layer, layer: nn.Module, rules: Mapping[int, AttentionRules]) -> None:
        attention, mlp = part(layer, "self_attn"), part(layer, "mlp")
        check_parts(layer, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
        check_parts(attention, {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"})
        check_parts(mlp, {"gate_proj", "up_proj", "down_proj", "act_fn"})
        projections = [part(attention, name) for name in ("q_proj", "k_proj", "v_proj")]
        width = int(attention.head_dim)  # type: ignore[arg-type]
        widths = [each.out_features for each in linears_of(projections)]
        shapes = (width, widths[0] // width, widths[1] // width)
        own = rules[int(attention.layer_idx)]  # type: ignore[arg-type]
        is_uneven = width % HEAD_MULTIPLE or self._shapes not in (None, shapes)
        if is_uneven or own.softcap is not None or own.has_sinks:
            raise UnknownStructureError("heads of several or odd shapes, a soft cap, or attention sinks")
        self._shapes = shapes
        item.qkv = self._product(*projections)
        item.output = self._product(part(attention, "o_proj"))
        item.gate_up = self._product(part(mlp, "gate_proj"), part(mlp, "up_proj"))
        item.down = self._product(part(mlp, "down_proj"))
        item.norm_before_attention = self._norm(part(layer, "input_layernorm"))
        item.norm_before_mlp = self._norm(part(layer, "post_attention_layernorm"))
        if hasattr(attention, "q_norm"):
            item.query_norm = self._norm(part(attention, "q_norm"))
            item.key_norm = self._norm(part(attention, "k_norm"))
        item.window = own.window or 0
        item.scale = width**-0.5 if own.scale is None else own.scale

    def _product(self, *layers: nn.Module) -> cpu_library.Product:
        """Linear layers of the same input as one packed matrix."""
        linears = linears_of(layers)
        biases: list[Tensor] = [layer.bias.detach() for layer in linears if layer.bias is not None]
        num_outputs, num_inputs = sum(len(layer.weight) for layer in linears), linears[0].weight.shape[1]
        if num_inputs % INPUT_MULTIPLE or (biases and len(biases) < len(layers)):
            raise UnknownStructureError("an odd number of inputs, or biases in some layers of the same input")
        panel = self._library.panel_width()
        packed = _huge(-(-num_outputs // panel) * panel * num_inputs, self._dtype)
        is_half = self._dtype == torch.bfloat16
        weights = [layer.weight.detach() for layer in linears]
        weight = weights[0].contiguous() if len(weights) == 1 else torch.cat(weights)
        self._library.pack_weight(weight.data_ptr(), num_outputs, num_inputs, is_half, packed.data_ptr())
        self._kept.append(packed)
        bias = self._numbers(*biases) if biases else None
        return cpu_library.Product(packed.data_ptr(), bias, num_inputs, num_outputs)

    def _norm(self, norm: nn.Module) -> int:
        if not isinstance(getattr(norm, "variance_epsilon", None), float):
            raise UnknownStructureError(f"{type(norm).__name__} is not a norm of Llama's kind")
        return self._numbers(part_weight(norm))

    def _numbers(self, *parts: Tensor) -> int:
        """The address of a float32 copy of these, one after the other."""
        copied = torch.empty(sum(len(each) for each in parts))
        copied.copy_(torch.cat([each.detach().float() for each in parts]))
        return self._address(copied)

    def _address(self, values: Tensor) -> int:
        self._kept.append(values.detach().contiguous())
        return self._kept[-1].data_ptr()


def _huge(num_numbers: int, dtype: torch.dtype) -> Tensor:
    """Memory in large pages where the system has them: a pass reads all weights, one after the other, and has
    to look up the address of every page."""
    num_bytes = num_numbers * dtype.itemsize
    if num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_numbers, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE
    return whole[begin : begin + num_bytes].view(dtype)


def part(module: nn.Module, name: str) -> nn.Module:
    part = getattr(module, name, None)
    if not isinstance(part, nn.Module):
        raise UnknownStructureError(f"{type(module).__name__} has no {name}")
    return part


def check_parts(module: nn.Module, known: set[str]) -> None:
    """Raises for parts that would be left out."""
    unknown = {name for name, _ in module.named_children()} - known
    if unknown:
        raise UnknownStructureError(f"{type(module).__name__} has {', '.join(sorted(unknown))}")


def linears_of(layers: Sequence[nn.Module]) -> Sequence[nn.Linear]:
    # Not isinstance: a sharded, quantised or adapted layer computes something else from its weight.
    if any(type(layer) is not nn.Linear for layer in layers):
        raise UnknownStructureError("a layer that is not plainly linear, such as a sharded one")
    return cast("Sequence[nn.Linear]", layers)


def part_weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _epsilon(norm: nn.Module) -> float:
    return float(norm.variance_epsilon)  # type: ignore[arg-type]
