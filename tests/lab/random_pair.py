"""A random pair of a chosen acceptance rate: a target, and its first layers as draft.

    python -m tests.lab.random_pair --shape 350m --acceptance 0.8 --output runs/350m
    python -m tests.lab.random_pair --shape 70b --epsilon 0.05 --dtype bfloat16 --output runs/70b

Where no trained pair of a size is available, it shows the cost of an engine; its text means nothing. Weights
are written layer by layer, and scaled so that greedy text does not degenerate and the acceptance rate is
meaningful:

- Embeddings and the outputs of the draft's layers have the same size and attention is sharp: the next token
  depends on the whole context, and the text does not repeat itself.
- What the later layers add to the residual stream is scaled by ε: at 0 target and draft are one function.
- The head is untied and gives logits of standard deviation σ = 2 sqrt(2 ln V). Of V independent normal logits
  the sum of squared probabilities tends to 1 - sqrt(2 ln V) / σ (Derrida 1981, the random energy model), here
  one half: about as peaked as a trained model.

B rows, P prompt tokens, N new tokens, H hidden size.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from specdist.data.store.files import write_json
from specdist.lab.plan.shapes import SHAPES, Shape
from specdist.models.files.weight_files import INDEX_SUFFIX, SAFETENSORS_NAME

ATTENTION_SCORE_STD = 4.0
EMBEDDINGS, HEAD = "embeddings", "head"
# Every piece (embeddings, head, a layer) has its own random stream.
PIECES_PER_SEED = 1000
MAX_POSITIONS = 4096
MANY_LAYERS = 16
SEARCH_SEED, MEASUREMENT_SEED = 1, 2
NUM_SAMPLE_ROWS, NUM_SAMPLE_PROMPT_TOKENS, NUM_SAMPLE_NEW_TOKENS = 32, 16, 32
LARGEST_EPSILON = 4.0
TOLERANCE = 0.05  # of ε, within which acceptance changes by less than the standard error of the sample


def num_draft_layers(shape: Shape) -> int:
    """The first layers of a target that are its draft."""
    return 2 if shape.num_layers > MANY_LAYERS else 1


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
    draft_pieces = [EMBEDDINGS, HEAD, *map(_layer, range(num_draft_layers(shape)))]
    for piece in draft_pieces:
        shutil.copyfile(target / _file_name(piece), draft / _file_name(piece))
    tokenizer = byte_tokenizer(shape.vocab_size)
    for path, pieces, num_layers in (
        (target, list(tensors_of_piece), shape.num_layers),
        (draft, draft_pieces, num_draft_layers(shape)),
    ):
        weight_map = {name: _file_name(piece) for piece in pieces for name in tensors_of_piece[piece]}
        write_json(path / f"{SAFETENSORS_NAME}{INDEX_SUFFIX}", {"metadata": {}, "weight_map": weight_map})
        config = shape.llama_config(
            dtype, num_hidden_layers=num_layers, max_position_embeddings=MAX_POSITIONS
        )
        config.save_pretrained(path)
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
        scale = 1.0 if layer < num_draft_layers(shape) else epsilon
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


def build_pair(
    folder: Path, shape: Shape, *, acceptance: float, seed: int, dtype: torch.dtype
) -> tuple[float, float]:
    """Write the pair with this greedy acceptance; returns the ε that was found, and the acceptance on other
    prompts. The target is loaded. Raises ValueError for an acceptance that no ε gives."""
    write_pair(folder, shape, epsilon=1.0, seed=seed, dtype=dtype)
    dialled = DialledTarget(folder / "target", num_draft_layers(shape), dtype=dtype)
    epsilon = find_epsilon(lambda value: dialled.acceptance(value, SEARCH_SEED), acceptance)
    write_pair(folder, shape, epsilon=epsilon, seed=seed, dtype=dtype)
    # On other prompts, because the search has fitted the noise of its own.
    return epsilon, dialled.acceptance(epsilon, MEASUREMENT_SEED)


def find_epsilon(acceptance_at: Callable[[float], float], wanted: float) -> float:
    """The ε with ``acceptance_at(ε)`` = ``wanted``, by bisection: acceptance is 1 at ε = 0, and falls.

    Raises ValueError if the largest ε still gives more than wanted.
    """
    if wanted == 1:
        return 0.0
    low, high = 0.0, LARGEST_EPSILON
    if (least := acceptance_at(high)) > wanted:
        raise ValueError(
            f"an acceptance of {wanted} is less than the {least:.2f} that remains when the later layers "
            "outweigh the first ones"
        )
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if acceptance_at(middle) < wanted else (middle, high)
    return low


class DialledTarget:
    """A loaded target that was written with ε = 1, whose ε can be changed; the draft is a part of it."""

    def __init__(self, folder: Path, num_layers_of_draft: int, *, dtype: torch.dtype) -> None:
        transformers_logging.disable_progress_bar()
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        self._num_draft_layers = num_layers_of_draft

    @torch.inference_mode()
    def acceptance(self, epsilon: float, seed: int) -> float:
        """Share of the target's greedy tokens after random prompts that are the draft's likeliest too."""
        prompts_BP = random_prompts(self._model.config.vocab_size, seed).to(self._model.device)
        with self._scaled(epsilon):
            output = self._model.generate(
                prompts_BP,
                attention_mask=torch.ones_like(prompts_BP),
                max_new_tokens=NUM_SAMPLE_NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
                output_hidden_states=True,
                return_dict_in_generate=True,
            )
        # The draft computes what the target's first layers do.
        hidden_BNH = torch.stack(
            [hidden[self._num_draft_layers][:, -1] for hidden in output.hidden_states], dim=1
        )
        draft_ids_BN = self._model.lm_head(self._model.model.norm(hidden_BNH)).argmax(-1)
        return (draft_ids_BN == output.sequences[:, prompts_BP.shape[1] :]).float().mean().item()

    @contextlib.contextmanager
    def _scaled(self, epsilon: float) -> Iterator[None]:
        def scale(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            del module, inputs
            return output * epsilon

        hooks = [
            part.register_forward_hook(scale)
            for layer in self._model.model.layers[self._num_draft_layers :]
            for part in (layer.self_attn.o_proj, layer.mlp.down_proj)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def random_prompts(vocab_size: int, seed: int) -> Tensor:
    """int64 [B, P]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (NUM_SAMPLE_ROWS, NUM_SAMPLE_PROMPT_TOKENS), generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder that gets target/ and draft/")
    parser.add_argument("--shape", choices=SHAPES, required=True)
    dial = parser.add_mutually_exclusive_group(required=True)
    dial.add_argument("--acceptance", type=float, help="greedy; the target is loaded to find it")
    dial.add_argument("--epsilon", type=float, help="weight of the later layers; takes one layer's memory")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shape, same = SHAPES[options.shape], {"seed": options.seed, "dtype": getattr(torch, options.dtype)}
    if options.acceptance is None:
        write_pair(options.output, shape, epsilon=options.epsilon, **same)
        found = {"epsilon": options.epsilon, "acceptance": None}
    else:
        epsilon, acceptance = build_pair(options.output, shape, acceptance=options.acceptance, **same)
        found = {"epsilon": epsilon, "acceptance": acceptance}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
