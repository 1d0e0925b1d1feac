"""Target-only generation: the proposer that proposes no candidates."""

from __future__ import annotations

import numpy as np

from specdist.engine.proposals import DRAW, ProposalReply, ProposalRequest
from specdist.engine.reports import AheadReport, RoleTimes
from specdist.engine.timeline import Timeline
from specdist.sampling.distributions import Dense
from specdist.sampling.random import RandomKeys
from specdist.sampling.rejection_sampler import sample_next_tokens


class NoDraft:
    """Every next token is sampled from the target's distribution, and nothing is drafted after it."""

    def __init__(self, num_slots: int) -> None:
        self._stream_keys = np.zeros(num_slots, np.int64)
        self._positions = np.zeros(num_slots, np.int64)

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        del clock
        slots_R = request.slots_R
        next_token_ids_R = request.next_token_ids_R.copy()
        drawn = np.flatnonzero(next_token_ids_R == DRAW)
        if len(drawn):
            assert isinstance(request.next_distributions_W, Dense)
            slots_W = slots_R[drawn]
            keys_W = RandomKeys(
                self._stream_keys[slots_W], self._positions[slots_W], np.zeros(len(drawn), np.int64)
            )
            next_token_ids_R[drawn] = sample_next_tokens(request.next_distributions_W, keys_W).cpu().numpy()
        self._positions[slots_R] += 1
        self._stream_keys[request.opened.slots] = request.opened.stream_keys
        self._positions[request.context.slots_T] = request.context.positions_T + 1
        nothing = np.zeros(0, np.int64)
        return ProposalReply(
            next_token_ids_R=next_token_ids_R,
            num_drafted_R=np.zeros(len(slots_R), np.int64),
            candidate_ids_C=nothing,
            draft_probabilities_C=nothing.astype(np.float64),
            ahead=AheadReport.nothing(len(slots_R)),
            draft_pass_sizes_P=nothing,
            times=RoleTimes(),
        )

    def close(self) -> None:
        """Nothing to do: no other rank waits."""
