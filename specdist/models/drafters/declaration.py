"""What a drafter that reads the target's hidden states declares, before anything of it is loaded.

Such a drafter gives, as a model does, logits of the token after a token, but it reads, beside the tokens,
what the target's layers know of them. Its kind says which states, and what it is to be asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel


@dataclass(frozen=True)
class ReadStates:
    """Which of the target's hidden states are read of every token: side by side, in this order.

    Attributes:
        before: layers, counted from 0, whose inputs are read; the number of layers names what leaves the last
            one, before the final norm.
        has_final: and what the output head reads, after the final norm.
    """

    before: tuple[int, ...] = ()
    has_final: bool = False


class Drafter(ABC):
    """A kind of drafters.

    Attributes:
        what: one of the kind, for messages.
        drafts_blocks: one pass gives all tokens of a round, instead of one.
    """

    what: str
    drafts_blocks = False

    @abstractmethod
    def fits(self, config: Any) -> bool:
        """Whether a configuration is of a drafter of this kind."""

    @abstractmethod
    def build(self, config: Any, **options: Any) -> PreTrainedModel:
        """The model of a configuration, on the device of the context. The configuration becomes its own;
        ``options``: as of transformers' ``from_config``."""

    @abstractmethod
    def read_states(self, config: Any, num_target_layers: int) -> ReadStates:
        """Of a drafter for a target of so many layers. Raises ValueError for layers that it has not."""

    @abstractmethod
    def num_read_numbers(self, config: Any) -> int:
        """Of the target's states of one token."""

    @abstractmethod
    def num_kept_numbers(self, config: Any) -> int:
        """That the drafter keeps of a token in its pages, beside keys and values."""

    def max_draft_tokens(self, config: Any) -> int | None:
        """That it can draft in one round; None without a limit."""
        del config
        return None
