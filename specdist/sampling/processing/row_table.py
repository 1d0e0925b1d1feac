"""What a process knows of the rows that run: their options and their tokens. No tensors.

A *line* is where the tokens of one continuation stand: of the target the sequence's slot, of the draft its
draft slot, which may be a branch's.

S slots, L lines, M slots that are filled, F options of a row, N positions that are asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


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


class RowTable:
    """Each row's options and prompt length, by slot; its tokens, by line and position.

    Attributes:
        token_ids: [L, most tokens]: a rejected candidate stays until another token takes its place, as in the
            cache; what a position means follows from the length that is asked for.
        num_prompt_tokens: int64 [S].
    """

    def __init__(self, defaults: TokenOptions, num_slots: int, token_ids: np.ndarray) -> None:
        self.token_ids = token_ids
        self.num_prompt_tokens = np.zeros(num_slots, np.int64)
        self._options_SF = np.tile(np.array(defaults.numbers), (num_slots, 1))

    def fill(
        self,
        slots_M: np.ndarray,
        options_MF: np.ndarray,
        num_prompt_tokens_M: np.ndarray,
        prefixes_M: Sequence[Sequence[int]],
    ) -> None:
        """New rows are in these slots. ``prefixes``: their first tokens, which no pass will run."""
        self._options_SF[slots_M] = options_MF
        self.num_prompt_tokens[slots_M] = num_prompt_tokens_M
        for slot, prefix in zip(slots_M.tolist(), prefixes_M, strict=True):
            self.token_ids[slot, : len(prefix)] = prefix

    def options_of(self, slots_N: np.ndarray) -> dict[str, np.ndarray]:
        """float64 [N] by name, of ``TOKEN_OPTIONS``."""
        return dict(zip(TOKEN_OPTIONS, self._options_SF[slots_N].T, strict=True))


@dataclass(frozen=True)
class QueryPositions:
    """Query positions: those whose next-token distribution is needed, on the host.

    All tokens before a position are in ``table.token_ids`` on its line: prompt, committed tokens, and the
    candidates of the block, or tokens drafted ahead, before it. Positions of one line that are asked together
    stand side by side and ascend by one: they are a block's, and each is asked under the condition that the
    candidates before it are accepted.

    Attributes:
        slots_N: the slot of each one's sequence.
        lines_N: where its tokens are; of a branch another line than the sequence's own.
        positions_N: index of the token to sample, which is the number of tokens before it.
    """

    table: RowTable
    slots_N: np.ndarray
    lines_N: np.ndarray
    positions_N: np.ndarray

    @property
    def num_new_N(self) -> np.ndarray:
        """Tokens of the completion before each position."""
        return np.asarray(self.positions_N - self.table.num_prompt_tokens[self.slots_N])

    def tokens_before(self, index: int) -> np.ndarray:
        """All token ids before one of the positions, the prompt's first; a view."""
        return np.asarray(self.table.token_ids[self.lines_N[index], : self.positions_N[index]])

    def new_tokens_before(self, index: int) -> np.ndarray:
        """The tokens of the completion before this index."""
        return self.tokens_before(index)[self.table.num_prompt_tokens[self.slots_N[index]] :]
