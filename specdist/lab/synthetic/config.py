"""Sizes of random pairs, from 5M to 70B parameters, and the options of ``jobs/make_synthetic.py``. Imports no
torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specdist.config.arguments import option
from specdist.utils.errors import UserError
from specdist.utils.rules import Rule, check_ranges, within

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig

MAX_POSITIONS = 4096


@dataclass(frozen=True)
class Shape:
    """Sizes of a target; its draft has the first ``num_draft_layers`` layers."""

    num_layers: int
    num_draft_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int

    def llama_config(self, *, num_layers: int, dtype: torch.dtype) -> LlamaConfig:
        """Without an end token, so that every completion has its maximum length."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=MAX_POSITIONS,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            tie_word_embeddings=False,
            architectures=["LlamaForCausalLM"],
            dtype=str(dtype).removeprefix("torch."),
        )


# Columns: layers, the draft's layers, hidden size, intermediate size, heads, key/value heads, vocabulary.
SHAPES = {
    "5m": Shape(8, 1, 192, 512, 6, 6, 4096),
    "20m": Shape(8, 1, 384, 1024, 6, 6, 8192),
    "125m": Shape(12, 1, 768, 2048, 12, 12, 32000),
    "350m": Shape(24, 2, 1024, 2560, 16, 16, 32000),
    "0.5b": Shape(24, 2, 896, 4864, 14, 2, 64000),
    "1b": Shape(22, 2, 2048, 5632, 32, 4, 32000),
    "7b": Shape(32, 2, 4096, 11008, 32, 32, 32000),
    "8b": Shape(32, 2, 4096, 14336, 32, 8, 128256),
    "70b": Shape(80, 2, 8192, 28672, 64, 8, 32000),
}

SHAPE = Rule(SHAPES.__contains__, f"is not a shape: choose one of {', '.join(SHAPES)}")
ACCEPTANCE, EPSILON = (
    within(above=0, at_most=1),
    within(at_least=0, below=math.inf, text="must be 0 or above"),
)
PAIR_SEED = Rule(lambda value: 0 <= value < 2**31, "must be in [0, 2**31)")


@dataclass(kw_only=True)
class SyntheticConfig:
    """Every option of the job. Raises :class:`UserError` for a value out of its range."""

    output: str = option(help="folder that gets target/, draft/ and synthetic.json")
    shape: str = option(rule=SHAPE, help=f"one of {', '.join(SHAPES)}")
    acceptance: float | None = option(
        None, rule=ACCEPTANCE, help="wanted greedy acceptance; the target is loaded to find it"
    )
    epsilon: float | None = option(
        None, rule=EPSILON, help="weight of the later layers instead; needs one layer's memory"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", help="of the stored weights")
    device: Literal["auto", "cpu", "cuda"] = option("auto", help="where --acceptance runs the target")
    seed: int = option(0, rule=PAIR_SEED, help="seed of the weights")

    def __post_init__(self) -> None:
        check_ranges(self)
        check_dial("shape", self.shape, acceptance=self.acceptance, epsilon=self.epsilon)


def check_dial(option_name: str, shape: str, *, acceptance: float | None, epsilon: float | None) -> None:
    """Raises :class:`UserError` unless exactly one of the two dials is given."""
    if (acceptance is None) == (epsilon is None):
        raise UserError(f"--{option_name} {shape} takes either --acceptance or --epsilon: give one of them")
