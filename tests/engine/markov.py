"""A Markov pair: models that are tables of logits, and a runner that keeps a paged cache as a real one does.

The logits of the next token depend on the last token and on a checksum of all tokens before it, which is read
from the cache, page by page. So every distribution is known exactly, a million tokens are cheap, and a cache
entry that is stale, in a wrong page or of a wrong position changes what comes next, as it does in a
transformer.

T flat tokens, N tokens whose logits are wanted, L positions, U sequences of one length, V vocabulary (prime),
P pages of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from specdist.models.batch.flat import FlatBatch, for_layers, slot_mapping
from specdist.models.cache.key_value import BranchPageTable, TokenCopies, pages_per_branch
from specdist.models.cache.pages import PageUpdates
from specdist.models.cache.prefix_states import NO_ROLLBACK, Rollback
from specdist.models.cache.windowed_pages import NULL_PAGE, WindowedLayers

VOCAB_SIZE = 7
CPU = torch.device("cpu")
# What an entry of the cache holds before anything is written there.
NEVER_WRITTEN = 3


def weights(positions: np.ndarray, vocab_size: int) -> np.ndarray:
    """The factors of the tokens in the checksum, by position: never 0, so that, the vocabulary being
    prime, every exchange of one token for another changes the sum."""
    return positions % (vocab_size - 1) + 1


@dataclass(frozen=True)
class MarkovModel:
    """``logits_VVV[last, checksum]`` are those of the next token; ``estimates_VV`` the logits of a trained
    head of the draft, of the last token; with ``uses_features`` they depend on the token's features too."""

    logits_VVV: Tensor
    estimates_VV: Tensor | None = None
    uses_features: bool = False
    # Of a layer that does nothing but to compare what it sees with the other's.
    window: int | None = None

    @property
    def vocab_size(self) -> int:
        return len(self.logits_VVV)

    @property
    def config(self) -> SimpleNamespace:
        return SimpleNamespace(vocab_size=self.vocab_size)

    def states_after(self, token_ids_UL: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Last token and checksum [U] of whole sequences."""
        before = token_ids_UL[:, :-1]
        checksums_U = before @ weights(np.arange(before.shape[1]), self.vocab_size) % self.vocab_size
        return token_ids_UL[:, -1], checksums_U

    def logits_after(self, token_ids_UL: Tensor) -> Tensor:
        """[U, V]"""
        return self.logits_VVV[self.states_after(token_ids_UL.numpy())]


def markov_pair(
    *,
    spread: float = 1.0,
    difference: float = 2.0,
    seed: int = 1,
    head_offset: float = 0.0,
    uses_features: bool = False,
) -> tuple[MarkovModel, MarkovModel]:
    """Target and draft. About half of the draft's tokens are accepted: a fault in what follows a
    rejection shows the sooner. The draft's head has an opinion of its own about every token."""
    generator = torch.Generator().manual_seed(seed)
    shape = (VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE)
    logits = spread * torch.randn(shape, generator=generator)
    noise = difference * torch.randn(shape, generator=generator)
    estimates = 2 * torch.randn(shape[:2], generator=generator) + head_offset
    return MarkovModel(logits), MarkovModel(logits + noise, estimates, uses_features)


def repetitive_model() -> MarkovModel:
    """What follows a token depends on the text before it a little, so that n-grams are often right."""
    weak, strong = markov_pair(spread=0.4, seed=2)[0], markov_pair(spread=3.5)[0]
    return MarkovModel(strong.logits_VVV[:, :1] + weak.logits_VVV)


class MarkovHead:
    """What the engine asks a :class:`specdist.models.passes.hidden.HiddenStateHead`."""

    reads_drawing_state = False

    def __init__(self, model: MarkovModel) -> None:
        self.takes_features = model.uses_features


class MarkovRunner:
    """What the engine uses of a :class:`specdist.models.passes.runner.ModelRunner`."""

    device = CPU
    is_asynchronous = keeps_states = False
    runs = reader = None

    def __init__(self, model: MarkovModel, *, ids: range | None = None, has_head: bool = False) -> None:
        """``ids``: the slice of the vocabulary whose logits it gives, by default all."""
        self.model = model
        self.head = MarkovHead(model) if has_head else None
        self.cache = self  # of branches
        ids = ids or range(model.vocab_size)
        self._logits_VVV = model.logits_VVV[:, :, ids.start : ids.stop].contiguous()
        self.windows = {0: None, 1: model.window}
        self.num_seen_in_windows = 0

    def allocate(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        max_seq_len: int,
        num_branch_slots: int = 0,
        max_branch_tokens: int = 0,
        windowed: WindowedLayers | None = None,
        rollback: Rollback = NO_ROLLBACK,
        num_prefix_states: int = 0,
    ) -> None:
        num_all_pages = num_pages + num_branch_slots * pages_per_branch(max_branch_tokens, page_size)
        self._page_size = page_size
        self._table = BranchPageTable(
            num_slots=num_slots,
            num_pages=num_pages,
            page_size=page_size,
            max_seq_len=max_seq_len,
            num_branch_slots=num_branch_slots,
            max_branch_tokens=max_branch_tokens,
            has_windowed=windowed is not None,
        )
        # Each token's part of the checksum: like a key, it depends on the position that it was run at.
        self._cache = np.full(num_all_pages * page_size, NEVER_WRITTEN, np.int64)
        num_windowed = 0 if windowed is None else windowed.num_pages
        self._windowed_cache = np.full(num_windowed * page_size, NEVER_WRITTEN, np.int64)

    def assume_contexts(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """There are no states."""

    def update_pages(self, updates: PageUpdates) -> None:
        self._table.update(updates)

    @property
    def pages(self) -> BranchPageTable:
        return self._table

    def open_branches(self, slots_B: np.ndarray, branches_B: np.ndarray, positions_B: np.ndarray) -> None:
        self._copy(self._table.open(slots_B, branches_B, positions_B))

    def adopt_branches(
        self, branches_B: np.ndarray, slots_B: np.ndarray, begins_B: np.ndarray, lengths_B: np.ndarray
    ) -> None:
        self._copy(self._table.adopt(branches_B, slots_B, begins_B, lengths_B))

    def _copy(self, copies: TokenCopies) -> None:
        sources_T, targets_T = copies
        self._cache[targets_T] = self._cache[sources_T]

    def num_run(self, batch: FlatBatch) -> int:
        return len(batch)

    def forward(self, batch: FlatBatch, logits_index: Sequence[int] | np.ndarray) -> Tensor:
        return self._logits_VVV[self._states(batch, logits_index)]

    def forward_with_estimates(
        self,
        batch: FlatBatch,
        logits_index: Sequence[int] | np.ndarray,
        features_3N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert self.head is not None and (features_3N is not None) == self.head.takes_features
        assert self.model.estimates_VV is not None
        states = self._states(batch, logits_index)
        estimates_N = self.model.estimates_VV[states].double()
        if features_3N is not None:
            estimates_N = estimates_N + 2 * (features_3N[1] - 0.5)
        return self._logits_VVV[states], estimates_N.sigmoid()

    def is_cached(self, slot: int, begin: int, token_ids: np.ndarray) -> bool:
        """Whether the cache holds these tokens at the row's positions from ``begin`` on."""
        positions = begin + np.arange(len(token_ids))
        batch = FlatBatch(token_ids, np.full(len(token_ids), slot), positions)
        found = self._cache[slot_mapping(batch, self._table.pages, self._page_size)]
        return bool((found == token_ids * weights(positions, self.model.vocab_size)).all())

    def _states(
        self, batch: FlatBatch, logits_index: Sequence[int] | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Write what the tokens leave in the cache, then read what stands before those that are asked for."""
        token_ids_T = np.asarray(batch.token_ids_T)
        vocab_size = self.model.vocab_size
        batch, pages_SP = for_layers(batch, self._table), self._table.pages
        index_T = slot_mapping(batch, pages_SP, self._page_size)
        self._cache[index_T] = token_ids_T * weights(batch.model_positions_T, vocab_size)
        self._look_at_windows(batch, index_T)
        index_N = np.asarray(logits_index, np.int64)
        positions_N = batch.positions_T[index_N]
        longest = int(positions_N.max(initial=0))
        num_pages = -(-longest // self._page_size)
        pages_NP = pages_SP[batch.slots_T[index_N], :num_pages].astype(np.int64)
        places_NL = pages_NP[:, :, None] * self._page_size + np.arange(self._page_size)
        places_NL = places_NL.reshape(len(index_N), num_pages * self._page_size)
        is_before_NL = np.arange(places_NL.shape[1]) < positions_N[:, None]
        checksums_N = np.where(is_before_NL, self._cache[places_NL], 0).sum(axis=1) % vocab_size
        return token_ids_T[index_N], checksums_N

    def _look_at_windows(self, batch: FlatBatch, index_T: np.ndarray) -> None:
        """Write to windowed pages, too: every token sees there what it sees in the others, and before its
        window pages that nobody writes."""
        pages_SP, window = batch.windowed_pages_SP, self.model.window
        if pages_SP is None:
            return
        assert window is not None
        own_T = slot_mapping(batch, pages_SP, self._page_size)
        assert len(np.unique(own_T)) == len(own_T) and own_T.min() >= (NULL_PAGE + 1) * self._page_size
        self._windowed_cache[own_T] = self._cache[index_T]
        positions_TW = batch.positions_T[:, None] - np.arange(window)
        slots_TW = np.broadcast_to(batch.slots_T[:, None], positions_TW.shape)
        is_seen_TW = positions_TW >= 0
        seen = FlatBatch(batch.token_ids_T, slots_TW[is_seen_TW], positions_TW[is_seen_TW])
        found, expected = (
            cache[slot_mapping(seen, table, self._page_size)]
            for cache, table in ((self._windowed_cache, pages_SP), (self._cache, self._table.pages))
        )
        assert (found == expected).all(), "a token sees others in its window"
        self.num_seen_in_windows += len(found)
        assert (self._windowed_cache[: self._page_size] == NEVER_WRITTEN).all()
