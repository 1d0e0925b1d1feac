"""Prompts that the draft has not run: put off until it is asked about their sequences, if it ever is.

A draft in the target's process, whose policy drafts nothing where plain decoding is faster, is not asked in
those rounds. So a run in which nothing pays costs what the target alone costs.

A page stands for the same tokens in both models' caches, and a sequence may share pages that the draft has
never written. So it is noted which of them it has written. Where several sequences share pages that it has
not, the first of them runs their tokens, for all. With states of recurrent layers each runs its own.

A sequences, T tokens of several, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from specdist.engine.draft.steps.draft_state import DraftState
from specdist.engine.messages.proposals import ProposalRequest
from specdist.models.batch.flat import FlatBatch
from specdist.models.passes.runner import ModelRunner
from specdist.policies import LengthPolicy
from specdist.utils.ranges import places_from

# Rounds of a pause after a decision against drafting.
FEWEST_PAUSED, MOST_PAUSED = 32, 256


class Pauses:
    """The pauses of a draft in the target's process, whose policy has been asked: rounds without it after a
    decision against drafting, twice as many after each further one, since to decide takes time, too."""

    def __init__(self) -> None:
        self._num_rounds = FEWEST_PAUSED

    def after(self, *, has_drafted: bool) -> int:
        """Rounds in which the target goes on alone now."""
        num_rounds, self._num_rounds = self._num_rounds, min(2 * self._num_rounds, MOST_PAUSED)
        if has_drafted:
            num_rounds, self._num_rounds = 0, FEWEST_PAUSED
        return num_rounds


class LazyPrefill:
    """The context of each slot's sequence; and of each page whether the draft has written it."""

    def __init__(
        self,
        runner: ModelRunner,
        draft_state: DraftState,
        policy: LengthPolicy,
        *,
        num_pages: int,
        page_size: int,
        max_tokens: int,
    ) -> None:
        """``num_pages``, of ``page_size`` tokens: of the page table, which is the target's, too.
        ``max_tokens``: of a pass."""
        self._runner, self._draft_state, self._max_tokens = runner, draft_state, max_tokens
        self._policy, self._pauses = policy, Pauses()
        self._page_size = page_size
        # The tokens of each context before the first one that was told, in shared pages; and all so far.
        self._num_shared, self._ends = np.zeros((2, len(draft_state.num_committed)), np.int64)
        self._is_written = np.zeros(num_pages, bool)
        self._request: ProposalRequest | None = None

    def follow(self, request: ProposalRequest) -> None:
        """Sequences begin, and pages change hands. To be called before the page table is updated."""
        self._request = request
        if len(request.missed):
            self._policy.note_pause(len(request.missed) // max(1, len(request.slots_R)))
        contexts, opened, updates = request.context, request.opened.slots, request.page_updates
        slots, firsts = np.unique(contexts.slots_T, return_index=True)
        begins = dict(zip(slots.tolist(), contexts.positions_T[firsts].tolist(), strict=True))
        self._num_shared[opened] = [begins[slot] for slot in opened.tolist()]
        ends = np.where(np.isin(updates.slots, opened), self._num_shared[updates.slots], 0)
        self._is_written[updates.pages[updates.indices * self._page_size >= ends]] = False

    def num_rounds_alone(self, request: ProposalRequest) -> int:
        """Rounds in which the target need not ask, after this one's decision."""
        has_drafted = bool(self._draft_state.num_candidates[request.slots_R].any())
        # Where there is no room for candidates, the policy has not been asked.
        is_decided = has_drafted or request.draft_now_R.any()
        return self._pauses.after(has_drafted=has_drafted) if is_decided else 0

    def put_off(self, context: FlatBatch) -> None:
        """These tokens, which the draft state has; a sequence's first ones come first."""
        slots_T, positions_T = context.slots_T, context.positions_T
        is_first_T = positions_T == self._num_shared[slots_T]
        self._draft_state.num_computed[slots_T[is_first_T]] = 0
        # Positions ascend within a slot, so the last write is the largest.
        self._ends[slots_T] = positions_T + 1

    def run(self, slots_A: np.ndarray) -> None:
        """What the cache lacks of these sequences' contexts; and of the tokens since, if they are too many
        for one pass."""
        state = self._draft_state
        late = slots_A[state.num_computed[slots_A] < self._ends[slots_A]]
        if len(late):
            begins = np.fromiter(self._begins(late), np.int64, len(late))
            self._run_up_to(late, begins, self._ends[late])
        # The pass that draws the next token has the last token of each, at least.
        begins_A, ends_A = state.num_computed[slots_A], state.num_committed[slots_A] - 1
        if np.maximum(ends_A - begins_A, 0).sum() > self._max_tokens:
            lacking = ends_A > begins_A
            self._run_up_to(slots_A[lacking], begins_A[lacking], ends_A[lacking])

    def _run_up_to(self, slots: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> None:
        places_T = places_from(slots, begins, ends - begins)
        for part in FlatBatch(self._draft_state.token_ids[places_T], *places_T).parts(self._max_tokens):
            self._runner.forward(part, [])
        self._draft_state.num_computed[slots] = ends

    def _begins(self, slots: np.ndarray) -> Iterator[int]:
        """Where each sequence's pass begins, after the pages that have been written or will be before it."""
        for slot in slots.tolist():
            pages = self._runner.pages.pages[slot, : self._ends[slot] // self._page_size]
            lacking = np.flatnonzero(~self._is_written[pages] | self._runner.keeps_states)
            begin = int(lacking[0]) * self._page_size if len(lacking) else len(pages) * self._page_size
            self._is_written[pages] = True
            if begin < self._num_shared[slot]:
                self._read_shared(slot)
            yield begin

    def _read_shared(self, slot: int) -> None:
        """The tokens of the shared pages, which were not told with the others."""
        assert self._request is not None
        index = int(np.flatnonzero(self._request.slots_R == slot)[0])
        num_shared = int(self._num_shared[slot])
        self._draft_state.token_ids[slot, :num_shared] = self._request.sequences[index].token_ids[:num_shared]
