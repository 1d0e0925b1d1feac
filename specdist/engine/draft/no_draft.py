"""Target-only generation: the proposer that proposes no candidates."""

from __future__ import annotations

import numpy as np

from specdist.engine.messages.proposals import DRAW, ProposalReply, ProposalRequest
from specdist.engine.times.reports import AheadReport, RoleTimes
from specdist.engine.times.timeline import Timeline
from specdist.sampling.distributions import Dense
from specdist.sampling.one_hot_drafts import without_rejected
from specdist.sampling.random import RandomKeys
from specdist.sampling.rejection_sampler import sample_next_tokens


class NoDraft:
    """Every next token is sampled from the target's distribution, and nothing is drafted after it."""

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        del clock
        nothing = np.zeros(0, np.int64)
        return ProposalReply(
            next_token_ids_R=sample_alone(request),
            num_drafted_R=np.zeros(len(request.slots_R), np.int64),
            candidate_ids_C=nothing,
            draft_probabilities_C=nothing.astype(np.float64),
            ahead=AheadReport.nothing(len(request.slots_R)),
            draft_pass_sizes_P=nothing,
            times=RoleTimes(),
        )

    def close(self) -> None:
        """Nothing to do: no other rank waits."""


def sample_alone(request: ProposalRequest, rejected_ids_R: np.ndarray | None = None) -> np.ndarray:
    """[R]: next tokens in whose places no draft model drew anything.

    ``rejected_ids_R``: candidates of a draft that was certain of them and that were rejected there, or
    ``NONE_REJECTED``.
    """
    request.meanwhile()
    next_token_ids_R = request.next_token_ids_R.copy()
    drawn = np.flatnonzero(next_token_ids_R == DRAW)
    if len(drawn):
        target_W = request.next_distributions_W
        assert isinstance(target_W, Dense)
        sequences = [request.sequences[index] for index in drawn]
        keys_W = RandomKeys(
            np.array([sequence.stream_key for sequence in sequences], np.int64),
            np.array([len(sequence.token_ids) for sequence in sequences], np.int64),
            np.array([sequence.counters.num_misses for sequence in sequences], np.int64),
        )
        if rejected_ids_R is not None:
            target_W = without_rejected(target_W, rejected_ids_R[drawn])
        next_token_ids_R[drawn] = sample_next_tokens(target_W, keys_W).cpu().numpy()
    return next_token_ids_R
