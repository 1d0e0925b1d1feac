"""The options of ``jobs/train_demo.py``. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from specdist.config.arguments import option
from specdist.utils.errors import UserError


@dataclass(kw_only=True)
class PairConfig:
    """Every option of ``jobs/train_demo.py``. Raises :class:`UserError` for a value out of its range."""

    output: str = option(help="folder that gets target/, draft/ and prompts.arrow")
    target_steps: int = option(500, help="steps to train the target, 1024 tokens each")
    target_seconds: float = option(72.0, help="end the target's training after this time at the latest")
    draft_steps: int = option(300, help="steps to distil the draft from the target")
    draft_seconds: float = option(28.0, help="end the draft's training after this time at the latest")
    num_vocab_tokens: int = option(2048, help="size of the vocabulary that both models share")
    target_layers: int = option(3, help="layers of the target")
    target_hidden_size: int = option(256, help="width of the target; a multiple of its 8 heads")
    draft_layers: int = option(1, help="layers of the draft")
    draft_hidden_size: int = option(128, help="width of the draft; a multiple of its 4 heads")
    num_prompts: int = option(128, help="prompts cut from held-out documents")
    seed: int = option(0, help="seed of the weights and of the order of the text")

    def __post_init__(self) -> None:
        self._require("target_steps", self.target_steps >= 1, "must be at least 1")
        self._require("draft_steps", self.draft_steps >= 1, "must be at least 1")
        self._require("target_seconds", self.target_seconds > 0, "must be positive")
        self._require("draft_seconds", self.draft_seconds > 0, "must be positive")
        self._require(
            "num_vocab_tokens", self.num_vocab_tokens >= 257, "must hold 256 bytes and one end token"
        )
        self._require("target_layers", self.target_layers >= 1, "must be at least 1")
        self._require("draft_layers", self.draft_layers >= 1, "must be at least 1")
        # Rotary embeddings turn pairs of a head's entries, so a head's width is even.
        self._require("target_hidden_size", self.target_hidden_size % 16 == 0, "must be a multiple of 16")
        self._require("draft_hidden_size", self.draft_hidden_size % 8 == 0, "must be a multiple of 8")
        self._require("num_prompts", self.num_prompts >= 1, "must be at least 1")

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise UserError(f"--{name} {getattr(self, name)!r} {rule}")
