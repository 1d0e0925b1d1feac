"""Temperature, top-k and top-p in plain operations; and the same, with min-p, with numbers of their own at
every position.

N positions, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdist.sampling.processing.row_table import QueryPositions
from specdist.sampling.uploads import upload


def tempered(logits_NV: Tensor, temperature: float) -> Tensor:
    """Logits over the temperature, which is positive. Half precision cannot hold the tail of a large
    vocabulary: at least float32."""
    return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature


def plain_probabilities(logits_NV: Tensor, *, temperature: float, top_k: int, top_p: float) -> Tensor:
    """[N, V] in float32 or wider: temperature, then top-k (0 = all), then top-p (1 = all), then softmax."""
    scores_NV = tempered(logits_NV, temperature)
    if 0 < top_k < scores_NV.shape[1]:
        kth_N1 = scores_NV.topk(top_k, dim=1).values[:, -1:]
        scores_NV = scores_NV.masked_fill(scores_NV < kth_N1, -torch.inf)
    if top_p < 1:
        ascending_NV = scores_NV.sort(dim=1).values
        outside_NV = ascending_NV.softmax(dim=1).cumsum(dim=1) <= 1 - top_p
        outside_NV[:, -1] = False
        # Which of equal scores a sort puts first is not the same on every device: all of them are kept.
        least_N1 = ascending_NV.gather(1, outside_NV.sum(dim=1, keepdim=True))
        scores_NV = scores_NV.masked_fill(scores_NV < least_N1, -torch.inf)
    return scores_NV.softmax(dim=1)


@dataclass(frozen=True, kw_only=True)
class RowFilters:
    """The numbers of N positions, on the device; and on the host what any of them needs.

    ``is_greedy_N1``: the likeliest token is taken, and no filter has an effect.
    """

    temperature_N1: Tensor
    is_greedy_N1: Tensor
    top_k_N1: Tensor
    top_p_N1: Tensor
    min_p_N1: Tensor
    most_top_k: int
    has_top_p: bool
    has_min_p: bool
    has_greedy: bool

    @staticmethod
    def of(asked: QueryPositions, vocab_size: int, device: torch.device) -> RowFilters:
        options = asked.table.options_of(asked.slots_N)
        is_greedy_N = options["temperature"] == 0
        # A greedy position needs no filter.
        top_k_N = np.where(is_greedy_N | (options["top_k"] >= vocab_size), 0, options["top_k"])
        top_p_N = np.where(is_greedy_N, 1.0, options["top_p"])
        min_p_N = np.where(is_greedy_N, 0.0, options["min_p"])
        temperature_N1, is_greedy_N1, top_k_N1, top_p_N1, min_p_N1 = upload(
            device,
            np.where(is_greedy_N, 1.0, options["temperature"])[:, None],
            is_greedy_N[:, None].astype(np.int64),
            top_k_N[:, None].astype(np.int64),
            top_p_N[:, None],
            min_p_N[:, None],
        )
        return RowFilters(
            temperature_N1=temperature_N1,
            is_greedy_N1=is_greedy_N1,
            top_k_N1=top_k_N1,
            top_p_N1=top_p_N1,
            min_p_N1=min_p_N1,
            most_top_k=int(top_k_N.max(initial=0)),
            has_top_p=bool((top_p_N < 1).any()),
            has_min_p=bool((min_p_N > 0).any()),
            has_greedy=bool(is_greedy_N.any()),
        )

    def select(self, index_M: Tensor) -> RowFilters:
        """The filters of some of the positions."""
        return dataclasses.replace(
            self,
            temperature_N1=self.temperature_N1[index_M],
            is_greedy_N1=self.is_greedy_N1[index_M],
            top_k_N1=self.top_k_N1[index_M],
            top_p_N1=self.top_p_N1[index_M],
            min_p_N1=self.min_p_N1[index_M],
        )

    def tempered(self, scores_NV: Tensor) -> Tensor:
        """Scores over the temperature; of greedy positions, as they are."""
        return scores_NV / self.temperature_N1.to(scores_NV.dtype)

    def within_top_k(self, scores_NV: Tensor, largest_NK: Tensor) -> Tensor:
        """Scores after top-k; ``largest``: the largest scores of all ids in descending order, at least
        ``most_top_k`` of them. All ids that tie with the k-th are kept."""
        if not self.most_top_k:
            return scores_NV
        kth_N1 = largest_NK.gather(1, (self.top_k_N1 - 1).clamp(min=0))
        return scores_NV.masked_fill((scores_NV < kth_N1) & (self.top_k_N1 > 0), -torch.inf)

    def within_min_p(self, scores_NV: Tensor, largest_N1: Tensor) -> Tensor:
        """Scores after min-p: as ``top_p`` before it changes the likeliest token's share of no other one,
        only the largest score counts."""
        if not self.has_min_p:
            return scores_NV
        parts_NV = (scores_NV - largest_N1).exp()
        return scores_NV.masked_fill(parts_NV < self.min_p_N1.to(parts_NV.dtype), -torch.inf)

    def probabilities(self, scores_NV: Tensor) -> Tensor:
        """[N, V], from processed scores: temperature, top-k, top-p, min-p, softmax; of greedy positions all
        mass on the largest score, of equal ones the lowest id."""
        given_NV, scores_NV = scores_NV, self.tempered(scores_NV)
        if self.most_top_k:
            scores_NV = self.within_top_k(scores_NV, scores_NV.topk(self.most_top_k, dim=1).values)
        if self.has_top_p:
            ascending_NV = scores_NV.sort(dim=1).values
            left_N1 = (1 - self.top_p_N1).to(scores_NV.dtype)
            # With top_p = 1 nothing is left out, not even what has no probability at all.
            outside_NV = (ascending_NV.softmax(dim=1).cumsum(dim=1) <= left_N1) & (self.top_p_N1 < 1)
            outside_NV[:, -1] = False
            least_N1 = ascending_NV.gather(1, outside_NV.sum(dim=1, keepdim=True))
            scores_NV = scores_NV.masked_fill(scores_NV < least_N1, -torch.inf)
        if self.has_min_p:
            scores_NV = self.within_min_p(scores_NV, scores_NV.amax(dim=1, keepdim=True))
        probabilities_NV = scores_NV.softmax(dim=1)
        if not self.has_greedy:
            return probabilities_NV
        best_N1 = given_NV.argmax(dim=1, keepdim=True)
        # Not a number where the largest score is none.
        ones_N1 = given_NV.gather(1, best_N1) * 0 + 1
        one_hot_NV = torch.zeros_like(probabilities_NV).scatter(1, best_N1, ones_N1)
        return torch.where(self.is_greedy_N1.bool(), one_hot_NV, probabilities_NV)
