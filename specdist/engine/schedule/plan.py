"""The limits of a batch, and a round within them as the scheduler plans it. No tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from specdist.engine.request import Sequence
from specdist.models.cache.pages import PageUpdates
from specdist.models.cache.prefix_states import Rollback
from specdist.models.cache.windowed_pages import WindowedLayers, num_pool_pages

# The placeholder of a token id that is to be sampled.
DRAW = -1


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """Limits of a batch, in sequences and tokens.

    Attributes:
        rope_borders: lengths beyond which the rope of a model has other frequencies.
        recomputed_from: the target's, if all of a sequence is to be run anew once it is longer.
        target_keeps_states, draft_keeps_states: whether it has recurrent layers. Then sequences of a target
            share prefixes up to where states are kept, and those of a draft none.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_draft_tokens: int
    num_ahead_tokens: int = 0
    max_new_tokens: int
    max_seq_len: int
    seed: int
    shares_room: bool = False
    rope_borders: tuple[int, ...] = ()
    recomputed_from: int | None = None
    target_keeps_states: bool = False
    draft_keeps_states: bool = False

    @property
    def num_slots(self) -> int:
        """Sequences in flight. Each must always get its whole block into a pass, or the lengths of its
        blocks, and with them its tokens, would depend on the other sequences; unless they may
        (``shares_room``): then blocks share half of the tokens, and prompts have the other half."""
        block = 2 if self.shares_room else self.max_draft_tokens + 1
        return max(1, min(self.max_num_seqs, self.max_num_batched_tokens // block))

    def most_candidates(self, num_rows: int) -> int:
        """The most candidates of each of so many sequences, in one pass."""
        if not self.shares_room:
            return self.max_draft_tokens
        return max(0, min(self.max_draft_tokens, self.max_num_batched_tokens // (2 * num_rows) - 1))

    @property
    def most_block_tokens(self) -> int:
        """The most tokens of all sequences' blocks in one pass."""
        most = self.max_num_batched_tokens // (2 if self.shares_room else 1)
        return max(self.num_slots, min(most, self.num_slots * (self.max_draft_tokens + 1)))

    @property
    def _num_reach_tokens(self) -> int:
        """The next token, candidates and those ahead, of which a draft that chooses its work may have as
        many."""
        return 1 + self.max_draft_tokens + max(self.num_ahead_tokens, self.max_draft_tokens + 1)

    @property
    def target_rollback(self) -> Rollback:
        """A block, but for its first token."""
        return Rollback(max(1, self.max_draft_tokens), follows_committed=True)

    @property
    def draft_rollback(self) -> Rollback:
        """What is drafted, also ahead; and the last token of a context, which is run twice."""
        return Rollback(self._num_reach_tokens + 2)

    @property
    def num_prefix_states(self) -> int:
        """States that a target with recurrent layers keeps beside those of its sequences: one for eight."""
        return max(2, self.num_slots // 8)

    def windowed_layers(self, window: int, page_size: int) -> WindowedLayers | None:
        """The target's windowed layers, if pages of their own save any. A prefix that ends at a kept state
        has none."""
        if self.target_keeps_states:
            return None
        num_pages = num_pool_pages(
            window,
            page_size=page_size,
            num_slots=self.num_slots,
            # Pages for a block are given before the candidates of the one before it are committed.
            num_reach_tokens=self.max_draft_tokens + self._num_reach_tokens,
            num_batched_tokens=self.max_num_batched_tokens,
            max_seq_len=self.max_seq_len,
        )
        is_less = num_pages < self.num_slots * -(-self.max_seq_len // page_size)
        return WindowedLayers(window, num_pages) if is_less else None

    def halved(self) -> SchedulerSettings:
        """Half the sequences and tokens, but at least one sequence and its block."""
        return replace(
            self,
            max_num_seqs=max(1, self.num_slots // 2),
            max_num_batched_tokens=max(self.max_draft_tokens + 1, self.max_num_batched_tokens // 2),
        )

    @property
    def is_smallest(self) -> bool:
        """One sequence at a time, and one block of it."""
        return self.num_slots == 1 and self.max_num_batched_tokens == self.max_draft_tokens + 1


@dataclass(frozen=True)
class Chunk:
    """Context tokens ``begin .. end - 1`` of a sequence, to be prefilled in this pass."""

    sequence: Sequence
    begin: int
    end: int

    @property
    def completes_context(self) -> bool:
        return self.end == self.sequence.context_length


@dataclass(frozen=True)
class RoundPlan:
    """One round: the sequences that decode, the most candidates of each, and the prompt chunks beside them.

    ``opened``: sequences that were just admitted. ``suspended_slots``: slots of those just preempted.
    """

    decoding: list[Sequence]
    draft_limits: list[int]
    chunks: list[Chunk]
    opened: list[Sequence]
    suspended_slots: list[int]
    page_updates: PageUpdates

    @property
    def is_empty(self) -> bool:
        return not self.decoding and not self.chunks

    @property
    def num_prefill_tokens(self) -> int:
        """The number of tokens of the chunks."""
        return sum(chunk.end - chunk.begin for chunk in self.chunks)


class LastPass(NamedTuple):
    """How the last pass ended for each sequence of a round.

    ``num_accepted_R``: how many of its candidates are accepted. ``num_redraft_R``, ``next_token_ids_R``: of a
    resumed sequence; else 0, and ``DRAW``.
    """

    slots_R: np.ndarray
    num_accepted_R: np.ndarray
    num_redraft_R: np.ndarray
    next_token_ids_R: np.ndarray

    @staticmethod
    def of(sequences: list[Sequence]) -> LastPass:
        """The last pass, from what has been committed."""
        forced = [DRAW if s.forced_next_token is None else s.forced_next_token for s in sequences]
        numbers = [
            (s.slot, s.num_accepted, s.num_redraft, next_token)
            for s, next_token in zip(sequences, forced, strict=True)
        ]
        return LastPass(*np.array(numbers, np.int64).reshape(-1, 4).T.copy())


def candidates_within(most: int, room: int) -> int:
    """The number of candidates that the completion's room allows: there is also a next token before and after
    them."""
    return max(0, min(most, room - 2))


def limits_within(most: int, rooms_R: np.ndarray) -> list[int]:
    """The same of R sequences."""
    limits: list[int] = np.maximum(np.minimum(rooms_R - 2, most), 0).tolist()
    return limits
