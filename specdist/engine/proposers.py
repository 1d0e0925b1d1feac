"""The proposers without a wire: the draft in the target's own process, and no draft at all."""

from __future__ import annotations

import numpy as np
import torch

from specdist.engine.draft_worker import DraftWorker
from specdist.engine.proposals import DRAW, ProposalReply, ProposalRequest, RoleTimes
from specdist.engine.timeline import Timeline
from specdist.sampling.random import Purpose, uniforms


class ColocatedDraft:
    """Target and draft in one process, one after the other."""

    def __init__(self, draft: DraftWorker) -> None:
        self._draft = draft

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        del clock  # the target waits all the while
        try:
            reply = self._draft.respond(request)
            self._draft.follow(request)
        except (RuntimeError, MemoryError):
            self._draft.abandon(is_heard=False)
            raise
        return reply

    def close(self) -> None:
        """Nothing runs elsewhere."""


class NoDraft:
    """Target-only generation: every next token is a plain draw, and nothing is drafted after it."""

    def __init__(self, num_slots: int) -> None:
        self._stream_keys = np.zeros(num_slots, np.int64)
        self._positions = np.zeros(num_slots, np.int64)

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        del clock
        slots_R = request.slots_R
        next_token_ids_R = request.next_token_ids_R.copy()
        drawn = np.flatnonzero(next_token_ids_R == DRAW)
        if len(drawn):
            assert request.next_distributions_W is not None
            slots_W = torch.from_numpy(slots_R[drawn])
            positions_W = torch.from_numpy(self._positions[slots_R[drawn]])
            uniforms_W = uniforms(
                torch.from_numpy(self._stream_keys)[slots_W],
                positions_W,
                torch.zeros_like(positions_W),
                Purpose.NEXT_TOKEN,
            )
            device = request.next_distributions_W.device
            next_token_ids_R[drawn] = request.next_distributions_W.draw(uniforms_W.to(device)).cpu().numpy()
        self._positions[slots_R] += 1
        self._stream_keys[request.opened.slots] = request.opened.stream_keys
        self._positions[request.context.slots_T] = request.context.positions_T + 1
        nothing = np.zeros(0, np.int64)
        return ProposalReply(
            next_token_ids_R=next_token_ids_R,
            num_drafted_R=np.zeros(len(slots_R), np.int64),
            candidate_ids_C=nothing,
            draft_probabilities_C=nothing.astype(np.float64),
            num_ahead_R=np.zeros(len(slots_R), np.int64),
            is_hit_R=np.zeros(len(slots_R), bool),
            num_branches_R=np.zeros(len(slots_R), np.int64),
            num_branch_tokens_R=np.zeros(len(slots_R), np.int64),
            branch_ranks_R=np.zeros(len(slots_R), np.int64),
            draft_pass_sizes_P=nothing,
            times=RoleTimes(),
        )

    def close(self) -> None:
        """Nothing runs elsewhere."""
