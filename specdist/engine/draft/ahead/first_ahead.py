"""The first token that was drafted ahead of each sequence: it stands in the place of the next token, and is
verified like any candidate.

R sequences that decode, W of them whose next token is sampled.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

from specdist.engine.draft.steps.draft_state import DraftState
from specdist.engine.messages.proposals import DRAW, ProposalRequest
from specdist.sampling.rejection_sampler import verify_candidates
from specdist.sampling.uploads import upload


class FirstAhead(NamedTuple):
    """The sequences' ``a_1``, in the places of their next tokens.

    Attributes:
        num_ahead_R: tokens drafted ahead, ``a_1`` among them.
        is_verified_R, is_hit_R: whether there was one and all candidates before it were accepted; whether it
            was accepted too.
    """

    num_ahead_R: np.ndarray
    is_verified_R: np.ndarray
    is_hit_R: np.ndarray

    @staticmethod
    @functools.cache
    def nothing(num_seqs: int) -> FirstAhead:
        """Where nothing is drafted ahead; nobody writes to it."""
        return FirstAhead(np.zeros(num_seqs, np.int64), *np.zeros((2, num_seqs), bool))


def verify_first(state: DraftState, request: ProposalRequest, positions_R: np.ndarray) -> FirstAhead:
    """Verify each sequence's ``a_1``, if it has one and all candidates before it were accepted.

    ``positions_R``: of the next tokens.
    """
    slots_R = request.slots_R
    num_ahead_R = state.num_ahead[slots_R]
    token_ids_R = state.token_ids[slots_R, positions_R]
    is_verified_R = (request.num_accepted_R == state.num_candidates[slots_R]) & (num_ahead_R > 0)
    is_hit_R = is_verified_R & (request.next_token_ids_R == token_ids_R)
    target_W = request.next_distributions_W
    if target_W is not None:
        drawn = np.flatnonzero(request.next_token_ids_R == DRAW)
        slots_W, positions_W = slots_R[drawn], positions_R[drawn]
        drafted_W = upload(target_W.device, token_ids_R[drawn])
        target_probabilities_W = target_W.probabilities_of(*drafted_W).cpu()
        draft_probabilities_W = torch.from_numpy(state.probabilities[slots_W, positions_W])
        keys_W = state.random_keys(slots_W, positions_W)
        accepted_W = verify_candidates(target_probabilities_W, draft_probabilities_W, keys_W).numpy()
        is_hit_R[drawn] = is_verified_R[drawn] & accepted_W
    return FirstAhead(num_ahead_R, is_verified_R, is_hit_R)
