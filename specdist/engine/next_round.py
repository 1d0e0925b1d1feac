"""The next round's plan and request, most of which is there before this round's pass is over.

In most rounds few sequences end and few begin. The next round has the others, and what the pass accepts only
decides how long they are. So the request is sent first, and the accepted tokens are appended and counted
while it is on its way or the draft is at work; before it, only those of sequences that they end.

R sequences that decode, W of them whose next token is sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specdist.engine.blocks import Block, flat_context
from specdist.engine.messages.proposals import DRAW, ProposalRequest
from specdist.engine.request import Sequence
from specdist.engine.schedule.plan import RoundPlan, limits_within
from specdist.engine.schedule.scheduler import Scheduler
from specdist.engine.schedule.stopping import StopRules
from specdist.engine.target.opened import OpenedSequences
from specdist.engine.verify import Verifier
from specdist.models.cache.draft_window import DraftWindow
from specdist.models.cache.pages import PageUpdates
from specdist.sampling.processing.options import Processing
from specdist.sampling.rejection_sampler import known_next_tokens


@dataclass(frozen=True, kw_only=True)
class LastPass:
    """How the last pass ended for each sequence of a round.

    Attributes:
        slots_R, num_accepted_R: how many of its candidates are accepted.
        num_redraft_R, next_token_ids_R: of a resumed sequence; else 0, and ``DRAW``.
    """

    slots_R: np.ndarray
    num_accepted_R: np.ndarray
    num_redraft_R: np.ndarray
    next_token_ids_R: np.ndarray

    @staticmethod
    def of(sequences: list[Sequence]) -> LastPass:
        """From what has been committed."""
        numbers = [
            (
                s.slot,
                s.num_accepted,
                s.num_redraft,
                DRAW if s.forced_next_token is None else s.forced_next_token,
            )
            for s in sequences
        ]
        slots_R, num_accepted_R, num_redraft_R, next_token_ids_R = (
            np.array(numbers, np.int64).reshape(-1, 4).T.copy()
        )
        return LastPass(
            slots_R=slots_R,
            num_accepted_R=num_accepted_R,
            num_redraft_R=num_redraft_R,
            next_token_ids_R=next_token_ids_R,
        )


@dataclass(frozen=True)
class NextRound:
    """A round of the sequences that run now, known while the pass before it is under way, but for those that
    this pass ends and those that begin in their places.

    Attributes:
        blocks: of that pass; after them come ``num_new`` sequences, whose first token this round's is.
        doubtful: indices of the blocks whose candidates may end their sequences.
        room_R: tokens that each completion has room for.
        num_redraft_R, next_token_ids_R: of the next :class:`LastPass`: none, and not known yet.
        most_candidates: of a sequence, as many as pages are reserved for.
    """

    scheduler: Scheduler
    stop_rules: StopRules
    sequences: list[Sequence]
    blocks: list[Block]
    doubtful: list[int]
    slots_R: np.ndarray
    room_R: np.ndarray
    num_redraft_R: np.ndarray
    next_token_ids_R: np.ndarray
    most_candidates: int
    num_new: int
    page_updates: PageUpdates

    @staticmethod
    def foresee(
        scheduler: Scheduler, stop_rules: StopRules, blocks: list[Block], plan: RoundPlan
    ) -> NextRound | None:
        """To be asked when all next tokens are committed. None if a context goes on after the pass over
        ``blocks`` and ``plan``'s chunks, or if pages are few."""
        sequences, new = scheduler.running, [chunk.sequence for chunk in plan.chunks]
        if (
            not sequences
            or sequences != [*(block.sequence for block in blocks), *new]
            or any(sequence.is_prefilling or sequence.forced_next_token is not None for sequence in new)
            or any(map(scheduler.must_recompute, sequences))
        ):
            return None
        num_candidates = [block.num_candidates for block in blocks]
        page_updates = scheduler.reserve_early(num_candidates + [0] * len(new))
        if page_updates is None:
            return None
        return NextRound(
            scheduler=scheduler,
            stop_rules=stop_rules,
            sequences=list(sequences),
            blocks=blocks,
            doubtful=[
                index
                for index, block in enumerate(blocks)
                if stop_rules.may_end(block.sequence, block.candidate_ids)
            ],
            slots_R=np.array([sequence.slot for sequence in sequences], np.int64),
            room_R=np.array([scheduler.room(sequence) for sequence in sequences], np.int64),
            num_redraft_R=np.zeros(len(sequences), np.int64),
            next_token_ids_R=np.full(len(sequences), DRAW),
            most_candidates=scheduler.most_candidates,
            num_new=len(new),
            page_updates=page_updates,
        )

    def ended(self, num_accepted_R: np.ndarray) -> list[int]:
        """Indices of the blocks whose accepted candidates end their sequences."""
        return [
            index
            for index in self.doubtful
            if self.stop_rules.check(
                self.blocks[index].sequence, self.blocks[index].candidate_ids[: num_accepted_R[index]]
            ).reason
            is not None
        ]

    def after(self, num_accepted_R: np.ndarray, ended: list[int]) -> tuple[RoundPlan, LastPass]:
        """The round, once it is known how many candidates of each block are accepted, and those that have
        ``ended`` have left the scheduler."""
        if self.num_new:
            num_accepted_R = np.concatenate([num_accepted_R, np.zeros(self.num_new, np.int64)])
        sequences, slots_R, room_R, updates = self.sequences, self.slots_R, self.room_R, self.page_updates
        if ended:
            goes_on_R = np.ones(len(sequences), bool)
            goes_on_R[ended] = False
            updates = updates.without(slots_R[ended])
            sequences = [sequences[index] for index in np.flatnonzero(goes_on_R)]
            slots_R, room_R, num_accepted_R = slots_R[goes_on_R], room_R[goes_on_R], num_accepted_R[goes_on_R]
        limits = limits_within(self.most_candidates, room_R - num_accepted_R)
        plan = self.scheduler.plan((sequences, limits, updates))
        num_seqs = len(sequences)
        last = LastPass(
            slots_R=slots_R,
            num_accepted_R=num_accepted_R,
            num_redraft_R=self.num_redraft_R[:num_seqs],
            next_token_ids_R=self.next_token_ids_R[:num_seqs],
        )
        return plan, last


def draft_request(
    plan: RoundPlan,
    last: LastPass,
    verifier: Verifier,
    *,
    window: DraftWindow | None,
    suspended_slots: list[int],
    processing: Processing | None,
    tells_texts: bool,
    meanwhile: Callable[[], None],
) -> ProposalRequest:
    """How the last round ended, and how many candidates there may be in this one."""
    sequences, next_token_ids_R = plan.decoding, last.next_token_ids_R
    next_distributions = None
    drawn = [sequence for sequence in sequences if sequence.forced_next_token is None]
    if drawn:
        next_distributions = verifier.next_distributions(drawn)
        known_ids = known_next_tokens(next_distributions)
        if known_ids is not None:
            is_drawn_R = slice(None) if len(drawn) == len(sequences) else next_token_ids_R == DRAW
            next_token_ids_R[is_drawn_R] = known_ids.cpu().numpy()
            next_distributions = None
    return ProposalRequest(
        page_updates=plan.page_updates,
        slots_R=last.slots_R,
        num_accepted_R=last.num_accepted_R,
        next_token_ids_R=next_token_ids_R,
        draft_now_R=np.array(plan.draft_limits, np.int64),
        num_redraft_R=last.num_redraft_R,
        next_distributions_W=next_distributions,
        sequences=sequences,
        meanwhile=meanwhile,
        suspended_slots=np.array(suspended_slots + plan.suspended_slots, np.int64),
        opened=OpenedSequences.of(plan.opened, processing, tells_texts, window is not None),
        context=flat_context(plan.chunks, window),
        num_prefill_tokens=sum(chunk.end - chunk.begin for chunk in plan.chunks),
    )
