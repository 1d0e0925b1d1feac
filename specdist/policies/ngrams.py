"""Prompt lookup: what a sequence's own earlier tokens say about its next ones, and how far that pays.

The lookup takes the longest earlier match of a sequence's last tokens, of at least two of them, and the
latest of equally long ones. The tokens after it are the candidates; where they reach the end of the text they
go on with their own beginning, as a repetition does. They are a function of the sequence's tokens alone.
(Prompt lookup: Saxena 2023; longest match: SuffixDecoding, Oliaro et al. 2024, arXiv:2411.04975.)

No clock, no tensors. R sequences, K candidates of each, N candidates, L positions, P places that match.
"""

from __future__ import annotations

import numpy as np

from specdist.policies.calibration import AcceptanceModel
from specdist.policies.costs import CostModel
from specdist.policies.payoff import worth_verifying

# Most tokens of a match that are counted.
MAX_MATCH = 16
# Prior of the acceptance of a candidate: offset, and slope over the logarithm of its match's length.
PRIOR_WEIGHTS_OF_MATCHES = (-1.9, 1.5)
# Least chance, of a candidate and all before it together, for which costs are asked.
LEAST_CHANCE = 0.02


class PromptLookup:
    """The tokens of every slot's sequence.

    Attributes:
        token_ids: int32 [slots, positions]; of every sequence, its tokens first.
        num_tokens: int64 [slots]: how many of them are known.
    """

    def __init__(self, num_slots: int, max_length: int) -> None:
        # Memory that is never written is never used.
        self.token_ids = np.zeros((num_slots, max_length), np.int32)
        self.num_tokens = np.zeros(num_slots, np.int64)

    def append(self, slot: int, token_ids: list[int]) -> None:
        """The next tokens of the sequence in this slot."""
        begin = int(self.num_tokens[slot])
        self.token_ids[slot, begin : begin + len(token_ids)] = token_ids
        self.num_tokens[slot] += len(token_ids)

    def find(self, slots_R: np.ndarray, num_candidates: int) -> tuple[np.ndarray, np.ndarray]:
        """[R, K]: so many candidates of each sequence, and the match of each if those before it are right; 0
        of a sequence without any."""
        last_R = np.maximum(self.num_tokens[slots_R] - 1, 0)
        tokens_RL = self.token_ids[slots_R, : int(last_R.max(initial=0)) + 1]
        latest_R1 = tokens_RL[np.arange(len(slots_R)), last_R][:, None]
        rows_P, places_P = np.divmod(np.flatnonzero(tokens_RL == latest_R1), tokens_RL.shape[1])
        is_earlier_P = places_P < last_R[rows_P]
        rows_P, places_P = rows_P[is_earlier_P], places_P[is_earlier_P]
        begins_R, lengths_R = np.zeros((2, len(slots_R)), np.int64)
        for length in range(2, MAX_MATCH + 1):
            # Before a sequence's first token nothing matches.
            back_P = np.maximum(places_P - length + 1, 0)
            ends_P = last_R[rows_P] - length + 1
            is_match_P = (tokens_RL[rows_P, back_P] == tokens_RL[rows_P, ends_P]) & (places_P >= length - 1)
            rows_P, places_P = rows_P[is_match_P], places_P[is_match_P]
            if not len(rows_P):
                break
            # Places rise, so that the latest one of each sequence stays.
            begins_R[rows_P], lengths_R[rows_P] = places_P + 1, length
        periods_R1 = (last_R - begins_R + 1)[:, None]
        places_RK = begins_R[:, None] + np.arange(num_candidates) % periods_R1
        matches_RK = np.minimum(lengths_R[:, None] + np.arange(num_candidates), MAX_MATCH)
        found_RK = self.token_ids[slots_R[:, None], places_RK].astype(np.int64)
        return found_RK, np.where(lengths_R[:, None] > 0, matches_RK, 0)


class NgramLengths:
    """How many candidates pay: chances by the length of their match, learned from all sequences, against the
    time that they add to the target's pass.

    The match of a candidate grows with every candidate before it. A match of 0 stands for a candidate that is
    certain.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._acceptance = AcceptanceModel(PRIOR_WEIGHTS_OF_MATCHES)

    def observe(self, matches_N: np.ndarray, is_right_N: np.ndarray) -> None:
        """Learn from candidates whose places have been filled, verified or not: of each sequence, the right
        ones and the first wrong one."""
        is_open_N = matches_N > 0
        self._acceptance.observe(_features(matches_N[is_open_N]), is_right_N[is_open_N])

    def chances(self, matches_RK: np.ndarray) -> np.ndarray:
        """[R, K]: the probability that a candidate and all before it are right."""
        rates = np.r_[1.0, self._acceptance.predict(_features(np.arange(1, MAX_MATCH + 1)))]
        chances_RK: np.ndarray = rates[matches_RK].cumprod(axis=1)
        return chances_RK

    def lengths(
        self, matches_RK: np.ndarray, lengths_R: np.ndarray, num_prompt_tokens: int, num_context: float
    ) -> np.ndarray:
        """[R]: how many of each sequence's ``lengths_R`` candidates are worth their time, in a pass that also
        has so many tokens of prompts. ``num_context``: mean context of the sequences.

        As with a draft model (:class:`specdist.policies.lengths.goodput.Goodput`), a candidate must add more
        tokens than the best such round commits in the time that it takes.
        """
        num_rows, width = matches_RK.shape
        chances_C = self.chances(matches_RK)[np.arange(width) < lengths_R[:, None]]
        if not len(chances_C):
            return lengths_R
        sizes = num_rows + np.arange(len(chances_C) + 1)
        host_ns = self._costs.message.look_up(num_rows)
        bare_ns, pass_ns = (
            host_ns + self._costs.target_ns(sizes + more, num_rows, num_context)
            for more in (0, num_prompt_tokens)
        )

        def value(expected: np.ndarray) -> np.ndarray:
            num_tokens = num_rows + expected
            return np.asarray(num_tokens - (num_tokens / bare_ns).max() * pass_ns)

        return worth_verifying(chances_C, lengths_R, value)


def _features(matches_N: np.ndarray) -> np.ndarray:
    return np.stack([np.ones(len(matches_N)), np.log(matches_N)], axis=1)
