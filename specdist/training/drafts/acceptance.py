"""Acceptance of a draft on the target's own texts by the engine's rule, and the speed-up that it predicts.

``a`` of a position is the probability that the token that the draft draws there is accepted, after the
target's own tokens: with ``rejection`` the common mass of both distributions (Leviathan et al. 2023,
Corollary 3.6), greedily and with ``gumbel`` whether the draft's draw, with the run's own noise, is the
target's token.

M positions, V vocabulary, N tokens of a completion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdist.sampling.coupling import next_token_distributions
from specdist.sampling.distributions import (
    Dense,
    OneHot,
    SamplingSettings,
    distributions_from_logits,
)

MAX_DRAFT_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where tokens were drawn: their ids, and the keys of their random numbers; int64 [M].

    ``probabilities_M``: of these tokens in the target's processed distributions, where they are known.
    """

    token_ids_M: Tensor
    stream_keys_M: Tensor
    positions_M: Tensor
    probabilities_M: Tensor | None = None


def needs_target(settings: SamplingSettings) -> bool:
    """Whether acceptance depends on the target's probabilities, not on its tokens alone."""
    return settings.is_random


def acceptances(
    logits_MV: Tensor, places: Places, settings: SamplingSettings, target_logits_MV: Tensor | None = None
) -> Tensor:
    """``a`` of every position, float64 [M].

    With ``rejection`` it is sum min(P, Q) where the target's logits are known; else min(1, Q / P) of the
    target's token, whose mean is the same.
    """
    if not settings.is_random:
        drawn = next_token_distributions(
            logits_MV.float(), settings, places.stream_keys_M, places.positions_M
        )
        assert isinstance(drawn, OneHot)
        return drawn.probabilities_of(places.token_ids_M)
    draft = distributions_from_logits(logits_MV.float(), settings)
    assert isinstance(draft, Dense)
    if target_logits_MV is not None:
        target = distributions_from_logits(target_logits_MV.float(), settings)
        assert isinstance(target, Dense)
        return torch.minimum(draft.probabilities_NV, target.probabilities_NV).sum(1).double()
    assert places.probabilities_M is not None
    return (draft.probabilities_of(places.token_ids_M) / places.probabilities_M).clamp(max=1)


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """What a draft promises: mean acceptance of a token, tokens per target pass with the best block length,
    and the speed-up over plain decoding.

    ``deviations``: what each completion adds to that speed-up beyond its share of the mean.
    """

    acceptance: float
    num_draft_tokens: int
    tokens_per_pass: float
    speed_up: float
    deviations: Sequence[float] = ()

    @property
    def error(self) -> float:
        """Standard error of the speed-up, from one completion to the next."""
        return float(np.linalg.norm(self.deviations))

    def error_beside(self, other: Prospect) -> float:
        """Standard error of the difference of two drafts' speed-ups on the same completions, which is far
        smaller than of either: what is easy for one is easy for the other."""
        return float(np.linalg.norm(np.subtract(self.deviations, other.deviations)))

    def figures(self) -> dict[str, float]:
        """Without what each completion adds."""
        found = dataclasses.asdict(self) | {"error": self.error}
        del found["deviations"]
        return found


def prospect(acceptances_N: Sequence[np.ndarray], cost_ratio: float) -> Prospect:
    """Of completions with these acceptances, for a draft step that takes ``cost_ratio`` of a target pass.

    A block of K tokens that begins before token i yields 1 + sum over k of a_i ... a_(i+k-1), which is exact
    greedily and with ``gumbel``, and for ``rejection`` an estimate along the target's own text, averaged over
    all tokens. The time of a round is that of taking turns (Leviathan et al. 2023, Theorem 3.8).
    """
    # Completions one after the other, each followed by room for a block.
    run = np.concatenate([np.pad(each, (0, MAX_DRAFT_TOKENS)) for each in acceptances_N])
    is_start = [np.arange(len(each) + MAX_DRAFT_TOKENS) < len(each) for each in acceptances_N]
    starts = np.flatnonzero(np.concatenate(is_start))
    # Of every start, the tokens of blocks of 0, 1, ... candidates.
    of_starts, alive = [np.ones(len(starts))], np.ones(len(starts))
    for depth in range(MAX_DRAFT_TOKENS):
        alive = alive * run[starts + depth]
        of_starts.append(of_starts[-1] + alive)
    tokens = [float(each.mean()) for each in of_starts]
    factors = [per_pass / (1 + length * cost_ratio) for length, per_pass in enumerate(tokens)]
    best = int(np.argmax(factors))
    ends = np.cumsum([len(each) for each in acceptances_N])[:-1]
    scale = factors[best] / tokens[best] / len(starts)
    deviations = [scale * float(part.sum()) for part in np.split(of_starts[best] - tokens[best], ends)]
    return Prospect(
        acceptance=float(np.concatenate(list(acceptances_N)).mean()),
        num_draft_tokens=best,
        tokens_per_pass=tokens[best],
        speed_up=factors[best],
        deviations=deviations,
    )
