"""The first token that was drafted ahead of each sequence: it stands in the place of the next token, and is
verified like any candidate.

R sequences that decode, W of them whose next token is sampled.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from specdist.engine.draft.steps.draft_features import Places, TokenFeatures
from specdist.engine.draft.steps.draft_state import DraftState
from specdist.engine.messages.proposals import DRAW, ProposalRequest
from specdist.engine.times.reports import TracedDrafts
from specdist.policies import DraftFeatures
from specdist.sampling.rejection_sampler import acceptance_probabilities, verify_candidates
from specdist.sampling.uploads import upload


@dataclass(frozen=True, kw_only=True)
class FirstAhead:
    """The sequences' ``a_1``, in the places of their next tokens.

    Attributes:
        num_ahead_R: tokens drafted ahead, ``a_1`` among them.
        is_verified_R, is_hit_R: whether there was one and all candidates before it were accepted; whether it
            was accepted too.
        token_ids_R, acceptance_R: the token, and the probability with which it is accepted.
        features: of these tokens, if the run is traced.
    """

    num_ahead_R: np.ndarray
    is_verified_R: np.ndarray
    is_hit_R: np.ndarray
    token_ids_R: np.ndarray
    acceptance_R: np.ndarray
    features: DraftFeatures | None

    @staticmethod
    @functools.cache
    def nothing(num_seqs: int) -> FirstAhead:
        """Where nothing is drafted ahead; nobody writes to it."""
        none_R, is_none_R = np.zeros(num_seqs, np.int64), np.zeros(num_seqs, bool)
        return FirstAhead(
            num_ahead_R=none_R, is_verified_R=is_none_R, is_hit_R=is_none_R, token_ids_R=none_R,
            acceptance_R=np.zeros(num_seqs), features=None,
        )  # fmt: skip

    def traced(self, features: TokenFeatures, candidates: Places) -> TracedDrafts | None:
        """What the trace needs, if there is one. ``features``: of all tokens."""
        if self.features is None:
            return None
        return TracedDrafts(
            features_4C=features.at(candidates).stacked(),
            is_verified_R=self.is_verified_R,
            is_hit_R=self.is_hit_R,
            token_ids_R=self.token_ids_R,
            features_4R=self.features.stacked(),
            acceptance_R=self.acceptance_R,
        )


def verify_first(
    state: DraftState, request: ProposalRequest, positions_R: np.ndarray, *, is_on: bool, is_traced: bool
) -> FirstAhead:
    """Verify each sequence's ``a_1``, if it has one and all candidates before it were accepted.

    Args:
        positions_R: of the next tokens.
        is_on: whether anything is ever drafted ahead.
    """
    slots_R = request.slots_R
    if not (is_on or is_traced):
        return FirstAhead.nothing(len(slots_R))
    num_ahead_R = state.num_ahead[slots_R]
    token_ids_R = state.token_ids[slots_R, positions_R]
    is_verified_R = (request.num_accepted_R == state.num_candidates[slots_R]) & (num_ahead_R > 0)
    is_hit_R = is_verified_R & (request.next_token_ids_R == token_ids_R)
    acceptance_R = is_hit_R.astype(np.float64)
    target_W = request.next_distributions_W
    if is_on and target_W is not None:
        drawn = np.flatnonzero(request.next_token_ids_R == DRAW)
        slots_W, positions_W = slots_R[drawn], positions_R[drawn]
        drafted_W = upload(target_W.device, token_ids_R[drawn])
        target_probabilities_W = target_W.probabilities_of(*drafted_W).cpu()
        draft_probabilities_W = torch.from_numpy(state.probabilities[slots_W, positions_W])
        keys_W = state.random_keys(slots_W, positions_W)
        accepted_W = verify_candidates(target_probabilities_W, draft_probabilities_W, keys_W).numpy()
        is_hit_R[drawn] = is_verified_R[drawn] & accepted_W
        acceptance_R[drawn] = acceptance_probabilities(target_probabilities_W, draft_probabilities_W)
    return FirstAhead(
        num_ahead_R=num_ahead_R,
        is_verified_R=is_verified_R,
        is_hit_R=is_hit_R,
        token_ids_R=token_ids_R,
        acceptance_R=acceptance_R,
        features=state.features.at((slots_R, positions_R)) if is_traced else None,
    )
