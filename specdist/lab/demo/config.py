"""The options of ``jobs/train_demo.py``. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from specdist.config.arguments import option
from specdist.utils.errors import UserError


@dataclass(kw_only=True)
class PairConfig:
    """Every option of ``jobs/train_demo.py``. Raises :class:`UserError` for a value out of its range."""

    output: str = option(help="output folder for target/, draft/ and prompts.arrow")
    target_steps: int = option(500, help="training steps of the target, 1024 tokens each")
    target_seconds: float = option(72.0, help="time limit of the target's training, in seconds")
    draft_steps: int = option(300, help="steps of distilling the draft from the target")
    draft_seconds: float = option(28.0, help="time limit of the draft's training, in seconds")
    num_vocab_tokens: int = option(2048, help="vocabulary size, shared by both models")
    target_layers: int = option(3, help="number of layers of the target")
    target_hidden_size: int = option(256, help="hidden size of the target; a multiple of 16")
    draft_layers: int = option(1, help="number of layers of the draft")
    draft_hidden_size: int = option(128, help="hidden size of the draft; a multiple of 8")
    num_prompts: int = option(128, help="number of prompts, cut from held-out documents")
    seed: int = option(0, help="seed of the weights and of the order of the training text")

    def __post_init__(self) -> None:
        for name in ("target_steps", "draft_steps", "target_layers", "draft_layers", "num_prompts"):
            self._require(name, getattr(self, name) >= 1, "must be at least 1")
        for name in ("target_seconds", "draft_seconds"):
            self._require(name, getattr(self, name) > 0, "must be positive")
        rule = "must be at least 257: 256 bytes and one end token"
        self._require("num_vocab_tokens", self.num_vocab_tokens >= 257, rule)
        # Rotary embeddings rotate pairs of a head's entries, so its width must be even.
        self._require("target_hidden_size", self.target_hidden_size % 16 == 0, "must be a multiple of 16")
        self._require("draft_hidden_size", self.draft_hidden_size % 8 == 0, "must be a multiple of 8")

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise UserError(f"--{name} {getattr(self, name)!r} {rule}")
