"""The same distributions from logits that are split by vocabulary, one slice on each of several ranks.

Every rank reduces its slice to a few numbers per token; from the numbers of all ranks, rank 0 computes the
result of the whole vocabulary. Only rounding differs, and without sums not even that.

N tokens whose logits are wanted, v ids of one slice, S slices, K of top-k, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdist.sampling.coupling import waiting_times
from specdist.sampling.distributions import NOT_FINITE, OneHot


def vocab_ranges(vocab_size: int, num_slices: int) -> list[range]:
    """Consecutive ids, split as evenly as possible; the first slices are the larger ones.

    Raises ValueError if a slice would be empty.
    """
    if vocab_size < num_slices:
        raise ValueError(f"{vocab_size} token ids cannot be cut into {num_slices} slices")
    width, num_wider = divmod(vocab_size, num_slices)
    ends = [width * (index + 1) + min(index + 1, num_wider) for index in range(num_slices)]
    return [range(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


@dataclass(frozen=True)
class Winners:
    """The best token of a slice, for each of N tokens. ``heights_N`` (float64) compare across slices: NaN or
    +inf means that the logits are not finite, -inf that the filters have left no id in the slice."""

    token_ids_N: Tensor
    heights_N: Tensor

    def packed(self) -> Tensor:
        """Scores and ids in one float64 tensor [2, N], which is exact for token ids."""
        return torch.stack([self.heights_N, self.token_ids_N.to(torch.float64)])


def likeliest(logits_Nv: Tensor, ids: range) -> Winners:
    """The largest logits; of equal ones, the lowest id."""
    winners_N = logits_Nv.argmax(dim=1)
    return Winners(winners_N + ids.start, _picked(logits_Nv, winners_N).to(torch.float64))


def race_winners(scores_Nv: Tensor, ids: range, stream_keys_N: Tensor, positions_N: Tensor) -> Winners:
    """The winners of the race of :func:`specdist.sampling.coupling.coupled_draws` among a slice's ids.

    Within a slice the race uses the slice's own softmax, since its normaliser is common to all its ids.
    Across slices the height is log P + G up to a constant common to all slices: the score minus the log of
    the waiting time, in float64, which can hold every score.

    Args:
        scores_Nv: float32 or wider, after temperature and filters; -inf where a filter has removed the id.
        stream_keys_N, positions_N: as for the draw over the whole vocabulary.
    """
    waiting_Nv = waiting_times(stream_keys_N, positions_N, ids, scores_Nv.device)
    # Without any id left this is all NaN; the height is still -inf, so the slice never wins.
    winners_N = (scores_Nv.softmax(dim=1) / waiting_Nv).argmax(dim=1)
    heights_N = _picked(scores_Nv, winners_N).to(torch.float64) - _picked(waiting_Nv, winners_N).log()
    # With a NaN among the scores the winner is arbitrary.
    largest_N = scores_Nv.amax(dim=1)
    return Winners(winners_N + ids.start, heights_N.where(largest_N < torch.inf, torch.nan))


def merge_winners(packed_S2N: Tensor) -> OneHot:
    """The highest of all slices' winners; of equal ones the lowest id, like ``argmax`` over all ids."""
    # NaN counts as the highest.
    best_N = packed_S2N[:, 0].argmax(dim=0)
    is_finite_N = _picked(packed_S2N[:, 0].T, best_N).isfinite()
    return OneHot(_picked(packed_S2N[:, 1].T, best_N).to(torch.int64).where(is_finite_N, NOT_FINITE))


def top_scores(scores_Nv: Tensor, k: int) -> Tensor:
    """[N, K]: the slice's K largest scores, padded with -inf if the slice has fewer ids."""
    top_NK = scores_Nv.topk(min(k, scores_Nv.shape[1]), dim=1).values
    return torch.nn.functional.pad(top_NK, (0, k - top_NK.shape[1]), value=-torch.inf)


def without_the_rest(scores_Nv: Tensor, top_SNK: Tensor) -> Tensor:
    """The slice after top-k over the whole vocabulary; all ids that tie with the k-th are kept."""
    top_NSK = top_SNK.transpose(0, 1)
    kth_N1 = top_NSK.flatten(1).topk(top_NSK.shape[2], dim=1).values[:, -1:]
    return scores_Nv.masked_fill(scores_Nv < kth_N1, -torch.inf)


def log_normalisers(scores_Nv: Tensor) -> Tensor:
    """float64 log of the sum of exponentials; -inf where all scores are."""
    largest_N1 = scores_Nv.amax(dim=1, keepdim=True)
    largest_N1 = largest_N1.masked_fill(largest_N1 == -torch.inf, 0)
    sums_N = (scores_Nv - largest_N1).exp().sum(dim=1, dtype=torch.float64)
    return sums_N.log() + largest_N1[:, 0]


def own_scores(scores_Nv: Tensor, ids: range, index_C: Tensor, token_ids_C: Tensor) -> Tensor:
    """float64 score of every candidate in the slice, -inf for the others.

    Args:
        index_C: which of the N logits verify each candidate.
    """
    places_C = token_ids_C - ids.start
    is_own_C = (places_C >= 0) & (places_C < len(ids))
    found_C = scores_Nv[index_C, places_C.where(is_own_C, 0)]
    return found_C.to(torch.float64).masked_fill(~is_own_C, -torch.inf)


def candidate_probabilities(normalisers_SN: Tensor, scores_SC: Tensor, index_C: Tensor) -> Tensor:
    """float64 probability of every candidate, from all slices' log-normalisers and candidates' scores."""
    return (scores_SC.amax(dim=0) - normalisers_SN.logsumexp(dim=0)[index_C]).exp()


def _picked(values_Nv: Tensor, index_N: Tensor) -> Tensor:
    return values_Nv.gather(1, index_N[:, None])[:, 0]
