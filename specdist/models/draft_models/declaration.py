"""What a drafter that reads the target's hidden states declares, before anything of it is loaded.

Such a drafter gives, as a model does, logits of the token after a token, but it reads, beside the tokens,
what the target's layers know of them. Its kind says which states, and what it is to be asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
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


@dataclass(frozen=True)
class Placement:
    """Where a drafter is loaded: on one device.

    Attributes:
        on_tensor: called after every tensor that was read.
        beside: the target, where that device has it.
    """

    dtype: torch.dtype
    device: torch.device
    on_tensor: Callable[[], None] = lambda: None
    beside: PreTrainedModel | None = None


class Drafter(ABC):
    """A kind of drafters.

    Attributes:
        what: one of the kind, for messages.
        drafts_blocks: one pass gives all tokens of a round, instead of one.
        shares_vocabulary: beside its target it has the target's embedding, and its output head if that is
            whole.
    """

    what: str
    drafts_blocks = False
    shares_vocabulary = False

    @abstractmethod
    def fits(self, config: Any) -> bool:
        """Whether a configuration is of a drafter of this kind."""

    @abstractmethod
    def build(self, config: Any, **options: Any) -> PreTrainedModel:
        """The model of a configuration, on the device of the context. The configuration becomes its own;
        ``options``: as of transformers' ``from_config``."""

    @abstractmethod
    def read_states(self, config: Any, num_target_layers: int) -> ReadStates:
        """The states that a drafter reads of a target of so many layers. Raises ValueError for layers that it
        has not."""

    @abstractmethod
    def num_read_numbers(self, config: Any) -> int:
        """The numbers of the target's states of one token that are read."""

    @abstractmethod
    def num_kept_numbers(self, config: Any) -> int:
        """The numbers that the drafter keeps of a token in its pages, beside keys and values."""

    def max_draft_tokens(self, config: Any) -> int | None:
        """The most tokens that it can draft in one round; None without a limit."""
        del config
        return None


class OwnFilesDrafter(Drafter):
    """A kind whose drafters have files of their own.

    Attributes:
        takes_head: where these have no output head, it is the target's.
        unused_names: beginnings of names in them that nothing here takes.
        renamed: beginnings of names in some of them, and what these are here.
    """

    takes_head = False
    unused_names: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def state_size(self, config: Any) -> int:
        """The size of the target's state in one layer."""
        return getattr(config, "target_hidden_size", None) or int(config.hidden_size)

    def faults(self, config: Any, target_config: Any) -> list[str]:
        """What a configuration names that does not go with this target, or is not read here."""
        text, size, found = target_config.get_text_config(), self.state_size(config), []
        if size != text.hidden_size:
            found.append(f"hidden states of {size} numbers, and the target's have {text.hidden_size}")
        if config.vocab_size != text.vocab_size:
            found.append(f"a target of {config.vocab_size} ids, and this one has {text.vocab_size}")
        try:
            self.read_states(config, text.num_hidden_layers)
        except ValueError as error:
            found.append(str(error))
        return found
