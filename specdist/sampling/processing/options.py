"""The options of a row's distributions, and what is common to all rows of a run. Pure Python."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """What shapes the distributions of one row. The defaults change nothing.

    Attributes:
        temperature, top_k, top_p: 0 = greedy; 0 = all; 1 = all.
        min_p: tokens with less than this part of the likeliest token's probability are left out; 0 = none.
        repetition_penalty: of tokens of prompt and completion, as transformers' processor; 1 = none.
        presence_penalty, frequency_penalty: of tokens of the completion, once and for every time, as OpenAI
            and vLLM define them: subtracted from the logits; 0 = none.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def numbers(self) -> tuple[float, ...]:
        """The values in the order of ``TOKEN_OPTIONS``."""
        return dataclasses.astuple(self)


TOKEN_OPTIONS = tuple(field.name for field in dataclasses.fields(TokenOptions))


@dataclass(frozen=True, kw_only=True)
class Processing:
    """How logits are processed before a token is drawn, beyond one temperature, top-k and top-p for all rows.

    Attributes:
        defaults: of rows without options of their own.
        logit_bias: token ids and what is added to their logits.
        bad_words: token ids that must not follow one another; of one alone, that must not appear.
        suppressed_ids: tokens that are never drawn.
        min_new_tokens: before so many new tokens, none of ``end_ids`` is drawn.
        has_masks: a :class:`specdist.sampling.processing.processors.TokenMasker` may allow some tokens only.
    """

    defaults: TokenOptions = field(default_factory=TokenOptions)
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    suppressed_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    has_masks: bool = False
