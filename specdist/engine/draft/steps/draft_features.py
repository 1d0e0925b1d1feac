"""Features of drafted tokens, and a trained head's estimates: for policies, heads and traces that use them.

A pass over a token gives the head's estimate of that token, so the estimate comes with the pass after the
token's draw; the other features come with the draw. (A head that reads the drawing state gives its estimate
with the draw, too.) A token that the draft has not drawn has no features.

R sequences, T tokens, C tokens of several sequences, one after the other.
"""

from __future__ import annotations

import numpy as np

from specdist.policies import NUM_FEATURES, DraftFeatures, VerifiedTokens
from specdist.utils.ranges import arange_segments

# Index of a token's last feature, a block drafter's confidence in its place.
CONFIDENCE = 3
UNKNOWN = np.nan
Places = tuple[np.ndarray, np.ndarray]


class TokenFeatures:
    """The fields of DraftFeatures by draft slot and position, NaN where unknown; estimates are confidences of
    a block drafter. Memory that is never written costs nothing."""

    def __init__(self, num_draft_slots: int, max_length: int) -> None:
        self._features = np.zeros((NUM_FEATURES, num_draft_slots, max_length), np.float32)
        # Where nothing asks for any, none is unknown.
        self.are_kept = True

    def forget(self, places: Places) -> None:
        """The tokens here are not drafted ones."""
        if not self.are_kept:
            return
        self._features[:, places[0], places[1]] = UNKNOWN

    def keep(self, places: Places, features_3T: np.ndarray) -> None:
        """All features but the confidence, of the tokens drawn here."""
        self._features[:CONFIDENCE, places[0], places[1]] = features_3T

    def keep_confidences(self, places: Places, confidences_T: np.ndarray | float) -> None:
        """What a block drafter was told of the places of these tokens before any draw; NaN: nothing."""
        self._features[CONFIDENCE, places[0], places[1]] = confidences_T

    def at(self, places: Places) -> DraftFeatures:
        return DraftFeatures(*self._features[:, places[0], places[1]].astype(np.float64))

    def verified(
        self,
        slots_R: np.ndarray,
        begins_R: np.ndarray,
        num_verified_R: np.ndarray,
        num_accepted_R: np.ndarray,
    ) -> VerifiedTokens:
        """What a policy that learns from single tokens is told: each sequence's verified tokens, from
        ``begins`` on, of which the first ones were accepted."""
        depths_C = arange_segments(num_verified_R)
        places_C = np.repeat(slots_R, num_verified_R), np.repeat(begins_R, num_verified_R) + depths_C
        return VerifiedTokens(
            features=self.at(places_C),
            depths_C=depths_C,
            is_accepted_C=depths_C < np.repeat(num_accepted_R, num_verified_R),
        )

    def head_inputs_at(self, places: Places) -> np.ndarray:
        """float32 [3, T]: what a head reads, 0 where unknown; its estimate there is dropped anyway."""
        return np.nan_to_num(self._features[:CONFIDENCE, places[0], places[1]])

    def copy(self, sources: Places, targets: Places) -> None:
        """Let the targets have the features of the sources."""
        if not self.are_kept:
            return
        self._features[:, targets[0], targets[1]] = self._features[:, sources[0], sources[1]]
