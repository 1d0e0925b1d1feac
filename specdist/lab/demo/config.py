"""The options of ``jobs/train_demo.py``. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from specdist.config.arguments import option
from specdist.utils.rules import Rule, check_ranges


@dataclass(kw_only=True)
class PairConfig:
    """Every option of ``jobs/train_demo.py``. Raises :class:`UserError` for a value out of its range."""

    output: str = option(help="output folder for target/, draft/ and prompts.arrow")
    target_steps: int = option(500, at_least=1, help="training steps of the target, 1024 tokens each")
    target_seconds: float = option(72.0, above=0, help="time limit of the target's training, in seconds")
    draft_steps: int = option(300, at_least=1, help="steps of distilling the draft from the target")
    draft_seconds: float = option(28.0, above=0, help="time limit of the draft's training, in seconds")
    num_vocab_tokens: int = option(
        2048, at_least=257, note="256 bytes and one end token", help="vocabulary size, shared by both models"
    )
    target_layers: int = option(3, at_least=1, help="number of layers of the target")
    # Rotary embeddings rotate pairs of a head's entries, so its width must be even.
    target_hidden_size: int = option(
        256, rule=Rule(lambda size: size % 16 == 0, "must be a multiple of 16"),
        help="hidden size of the target; a multiple of 16",
    )  # fmt: skip
    draft_layers: int = option(1, at_least=1, help="number of layers of the draft")
    draft_hidden_size: int = option(
        128, rule=Rule(lambda size: size % 8 == 0, "must be a multiple of 8"),
        help="hidden size of the draft; a multiple of 8",
    )  # fmt: skip
    num_prompts: int = option(128, at_least=1, help="number of prompts, cut from held-out documents")
    seed: int = option(0, help="seed of the weights and of the order of the training text")

    def __post_init__(self) -> None:
        check_ranges(self)
