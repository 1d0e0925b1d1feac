"""Weights of a random target whose draft is its own first layers, written layer by layer.

The weights are scaled so that greedy text does not degenerate and the acceptance rate is meaningful:

- Embeddings and the outputs of the draft's layers have the same size and attention is sharp: the next token
  depends on the whole context, and the text does not repeat itself.
- What the later layers add to the residual stream is scaled by ε: at 0 target and draft are one function.
- The head is untied and gives logits of standard deviation σ = 2 sqrt(2 ln V). Of V independent normal logits
  the sum of squared probabilities tends to 1 - sqrt(2 ln V) / σ (Derrida 1981, the random energy model), here
  one half: about as peaked as a trained model.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from specdist.data.store.files import write_json
from specdist.lab.synthetic.shapes import MAX_POSITIONS, Shape
from specdist.models.files.weight_files import SAFETENSORS_INDEX

ATTENTION_SCORE_STD = 4.0
EMBEDDINGS, HEAD = "embeddings", "head"
# Every piece (embeddings, head, a layer) has its own random stream.
PIECES_PER_SEED = 1000


def write_pair(folder: Path, shape: Shape, *, epsilon: float, seed: int, dtype: torch.dtype) -> None:
    """Write ``target/`` and ``draft/``: weights, configuration and tokenizer; one layer in memory at a time.

    The draft gets copies of the target's files.
    """
    target, draft = folder / "target", folder / "draft"
    for path in (target, draft):
        path.mkdir(parents=True, exist_ok=True)
    tensors_of_piece: dict[str, list[str]] = {}
    for piece, tensors in _pieces(shape, epsilon, seed):
        tensors_of_piece[piece] = list(tensors)
        save_file(
            {name: tensor.to(dtype) for name, tensor in tensors.items()},
            target / _file_name(piece),
            metadata={"format": "pt"},
        )
    draft_pieces = [EMBEDDINGS, HEAD, *map(_layer, range(shape.num_draft_layers))]
    for piece in draft_pieces:
        shutil.copyfile(target / _file_name(piece), draft / _file_name(piece))
    tokenizer = byte_tokenizer(shape.vocab_size)
    for path, pieces, num_layers in (
        (target, list(tensors_of_piece), shape.num_layers),
        (draft, draft_pieces, shape.num_draft_layers),
    ):
        weight_map = {name: _file_name(piece) for piece in pieces for name in tensors_of_piece[piece]}
        write_json(path / SAFETENSORS_INDEX, {"metadata": {}, "weight_map": weight_map})
        shape.llama_config(num_layers=num_layers, dtype=dtype).save_pretrained(path)
        tokenizer.save_pretrained(path)


def byte_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """One token per byte. The other ids, which no text encodes to, decode to pairs of bytes.

    ``vocab_size`` is from 256 to 256 + 256². There are no special tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = (first + second for first in alphabet for second in alphabet)
    tokens = [*alphabet, *(next(pairs) for _ in range(vocab_size - len(alphabet)))]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=MAX_POSITIONS, clean_up_tokenization_spaces=False
    )


def _pieces(shape: Shape, epsilon: float, seed: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    hidden, vocab = shape.hidden_size, shape.vocab_size
    yield EMBEDDINGS, {"model.embed_tokens.weight": _normal(vocab, hidden, 1.0, _generator(seed, 0))}
    logits_std = 2 * math.sqrt(2 * math.log(vocab))
    head = _normal(vocab, hidden, logits_std * hidden**-0.5, _generator(seed, 1))
    yield HEAD, {"lm_head.weight": head, "model.norm.weight": torch.ones(hidden)}
    for layer in range(shape.num_layers):
        scale = 1.0 if layer < shape.num_draft_layers else epsilon
        yield _layer(layer), _layer_tensors(shape, layer, scale, _generator(seed, 2 + layer))


def _layer_tensors(shape: Shape, layer: int, scale: float, generator: torch.Generator) -> dict[str, Tensor]:
    """Every map keeps the size of its input, except attention scores, and ``scale`` at the outputs."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    kv_width = hidden // shape.num_heads * shape.num_kv_heads
    query_scale = ATTENTION_SCORE_STD**0.5
    sizes = {
        "self_attn.q_proj": (hidden, hidden, query_scale),
        "self_attn.k_proj": (kv_width, hidden, query_scale),
        "self_attn.v_proj": (kv_width, hidden, 1.0),
        "self_attn.o_proj": (hidden, hidden, scale),
        "mlp.gate_proj": (inner, hidden, 1.0),
        "mlp.up_proj": (inner, hidden, 1.0),
        "mlp.down_proj": (hidden, inner, scale),
    }
    prefix = f"model.layers.{layer}"
    weights = {
        f"{prefix}.{name}.weight": _normal(rows, columns, factor * columns**-0.5, generator)
        for name, (rows, columns, factor) in sizes.items()
    }
    norms = {
        f"{prefix}.{name}.weight": torch.ones(hidden)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    return weights | norms


def _normal(num_rows: int, num_columns: int, std: float, generator: torch.Generator) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=generator).mul_(std)


def _generator(seed: int, piece: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * PIECES_PER_SEED + piece)


def _layer(number: int) -> str:
    return f"layer-{number:03d}"


def _file_name(piece: str) -> str:
    return f"{piece}.safetensors"
