"""Log-probabilities of tokens: of the target's own distribution, and of the processed one. A target on one
rank has one slice of the vocabulary, all of it.

M tokens, K likeliest, V vocabulary, v ids of one slice, S slices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdist.sampling.distributions import Dense, SamplingSettings, distributions_from_logits
from specdist.sampling.processing.row_filters import RowFilters
from specdist.sampling.vocab_parallel import log_normalisers, own_scores

# Columns of packed numbers: a token's log-normaliser and score before processing, then after it; the
# likeliest tokens' scores before it, and their ids.
NUM_OWN = 4
# Tokens of prompts that are scored at a time.
PROMPT_PIECE = 256


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of M tokens, on the host.

    Attributes:
        raw_M: float32, the logarithm of the softmax of the target's logits, as of a plain forward pass.
        processed_M: float32, of the distribution that the token was drawn from; of a greedy one, of the
            softmax of its processed logits.
        top_ids_MK, top_raw_MK: int32 and float32, the likeliest tokens before processing, likeliest first.
    """

    raw_M: np.ndarray
    processed_M: np.ndarray
    top_ids_MK: np.ndarray
    top_raw_MK: np.ndarray


def processed_logprobs(scores_MV: Tensor, settings: SamplingSettings, filters: RowFilters | None) -> Tensor:
    """[M, V], from the whole vocabulary's processed logits; -inf where a filter has removed a token."""
    found = distributions_from_logits(scores_MV, settings, filters)
    if not isinstance(found, Dense):
        return scores_MV.float().log_softmax(dim=1)
    logarithms_MV = found.probabilities_NV.log()
    if filters is None or not filters.has_greedy:
        return logarithms_MV
    return torch.where(filters.is_greedy_N1.bool(), scores_MV.float().log_softmax(dim=1), logarithms_MV)


def partial_scores(
    raw_Mv: Tensor, processed_Mv: Tensor, ids: range, token_ids_M: Tensor, num_top: int
) -> Tensor:
    """float64 [M, NUM_OWN + 2 K]: what a slice knows of the tokens and of the likeliest.

    Args:
        processed_Mv: scores whose softmax over all slices is the processed distribution.
    """
    lines_M = torch.arange(len(raw_Mv), device=raw_Mv.device)

    def own_columns(scores_Mv: Tensor) -> list[Tensor]:
        return [log_normalisers(scores_Mv.float()), own_scores(scores_Mv, ids, lines_M, token_ids_M)]

    own = own_columns(raw_Mv)
    own += own if processed_Mv is raw_Mv else own_columns(processed_Mv)
    top_MK = raw_Mv.topk(min(num_top, len(ids)), dim=1)
    missing = num_top - top_MK.values.shape[1]
    values_MK = torch.nn.functional.pad(top_MK.values.double(), (0, missing), value=-torch.inf)
    ids_MK = torch.nn.functional.pad((top_MK.indices + ids.start).double(), (0, missing))
    return torch.cat([torch.stack(own, dim=1), values_MK, ids_MK], dim=1)


def partial_prompt_scores(logits_Pv: Tensor, ids: range, token_ids_P: Tensor, num_top: int) -> Tensor:
    """Scores as :func:`partial_scores` gives them, of tokens that are not drawn. A few at a time: there may
    be thousands."""
    pieces = zip(logits_Pv.split(PROMPT_PIECE), token_ids_P.split(PROMPT_PIECE), strict=True)
    return torch.cat([partial_scores(piece_Mv, piece_Mv, ids, own_M, num_top) for piece_Mv, own_M in pieces])


def merged_logprobs(packed_SMC: Tensor, num_top: int, processed_M: Tensor | None = None) -> Logprobs:
    """Log-probabilities from all slices. ``processed``: log-probabilities that are known already."""
    own_4SM = packed_SMC[:, :, :NUM_OWN].permute(2, 0, 1)
    normalisers_M = own_4SM[0].logsumexp(dim=0)
    raw_M = own_4SM[1].amax(dim=0) - normalisers_M
    if processed_M is None:
        processed_M = own_4SM[3].amax(dim=0) - own_4SM[2].logsumexp(dim=0)
    values_MK, ids_MK = (
        part.transpose(0, 1).flatten(1)
        for part in packed_SMC[:, :, NUM_OWN:].split([num_top, num_top], dim=2)
    )
    values_MK, best_MK = values_MK.topk(num_top, dim=1)
    ids_MK = ids_MK.gather(1, best_MK)
    columns = [raw_M[:, None], processed_M.double()[:, None], values_MK - normalisers_M[:, None], ids_MK]
    numbers = torch.cat(columns, dim=1).cpu().numpy()
    return Logprobs(
        raw_M=numbers[:, 0].astype(np.float32),
        processed_M=numbers[:, 1].astype(np.float32),
        top_ids_MK=numbers[:, 2 + num_top :].astype(np.int32),
        top_raw_MK=numbers[:, 2 : 2 + num_top].astype(np.float32),
    )
