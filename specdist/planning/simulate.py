"""Predicted throughput of a replica, from the costs of its passes, if tokens are accepted independently.

The closed form of a steady state, in which the next prompt follows each sequence that ends. For the start
and the end of a job see :mod:`specdist.planning.events`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specdist.policies.costs import CostModel, Curve
from specdist.stats.regression import NS_PER_S
from specdist.theory.formulas import branches_for, ready_share, tokens_per_call, tokens_per_pass_ahead

# Prompts are cut into chunks of a pass's token budget.
PREFILL_CHUNK_TOKENS = 2048

Mode = Literal["target only", "colocated", "in turns", "ahead", "branches", "auto"]
# Those that are the same in every round.
MODES: tuple[Mode, ...] = ("target only", "colocated", "in turns", "ahead", "branches")
OWN_GPU: tuple[Mode, ...] = ("in turns", "ahead", "branches")


@dataclass(frozen=True)
class ReplicaCosts:
    """Times of a replica.

    Attributes:
        passes: of the target by its tokens, of the draft by sequences of one token each.
        draft_prefill: of the draft by the tokens of a prompt.
        round_s: of the host, for every round.
        proposal_s: of a proposal of any length: messages to the draft's rank and back, bookkeeping.
        state_bytes: of the target's states of one token, which an EAGLE-3 draft reads; ``state_s``: seconds
            that these are on their way to a rank of its own.
        target_prefill: of the target by tokens without any that is sampled from; None: as ``passes``.
    """

    passes: CostModel
    draft_prefill: Curve
    round_s: float
    proposal_s: float
    state_bytes: int = 0
    state_s: float = 0.0
    target_prefill: Curve | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a target runs: ``num_rows`` running sequences, ``num_draft_tokens`` candidates per round, and the
    share of misses ``caught`` by branches in a mode that has them. ``targets_per_draft`` equal ones share one
    draft."""

    mode: Mode
    num_rows: int
    num_draft_tokens: int
    acceptance: float
    caught: float = 0.0
    targets_per_draft: int = 1

    @property
    def is_ahead(self) -> bool:
        return self.mode in ("ahead", "branches")

    @property
    def num_branches(self) -> int:
        """Branches per sequence needed for the caught share."""
        return branches_for(self.caught) if self.mode == "branches" else 0

    @property
    def caught_share(self) -> float:
        return self.caught if self.mode == "branches" else 0.0


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A target with its draft in their steady state.

    Attributes:
        tokens_per_round: new tokens of one sequence.
        tokens_per_pass: run by the target for all sequences, without prompts.
        target_share, draft_share: shares of the time in which each works, with prompts; they overlap where
            the draft works ahead, or for other targets.
        prefill_share: share of the time for prompts on the target.
        state_bytes_per_round: of the target's states that the draft gets: of all new tokens and of prompts.
    """

    tokens_per_s: float
    tokens_per_round: float
    tokens_per_pass: float
    round_s: float
    target_share: float
    draft_share: float
    prefill_share: float
    state_bytes_per_round: float = 0.0


@dataclass(frozen=True)
class _Round:
    """Tokens of the target's pass, and new tokens per sequence, without prompts; and the seconds of the draft
    for so many sequences."""

    num_target_tokens: float
    tokens_per_row: float
    draft_s: Callable[[int], float]


def predict(
    costs: ReplicaCosts, settings: Settings, *, prompt_tokens: int = 0, output_tokens: int = 1
) -> Prediction:
    """The steady state; of decoding alone without ``prompt_tokens``."""
    plan = _round(costs, settings)
    num_rows, num_targets = settings.num_rows, settings.targets_per_draft
    num_prompts = num_rows * plan.tokens_per_row / output_tokens
    target_s = _seconds(costs.passes.target, plan.num_target_tokens)
    prefill_s, draft_prefill_s = _prefill(costs, settings, plan, prompt_tokens, num_prompts)
    target_s += prefill_s
    away_s, draft_s = costs.round_s + target_s, 0.0
    num_states = 0.0 if settings.mode == "target only" else num_rows * plan.tokens_per_row
    num_states += num_prompts * prompt_tokens if num_states else 0.0
    if settings.mode != "target only":
        away_s += costs.proposal_s
    if settings.mode in OWN_GPU:
        away_s += num_states * costs.state_s
    round_s = away_s
    if settings.mode != "target only":
        round_s, draft_s = _shared_round(
            away_s,
            num_targets,
            lambda count: plan.draft_s(count * num_rows) + count * draft_prefill_s,
            is_ahead=settings.is_ahead,
            unshared_s=away_s - target_s,
        )
    return Prediction(
        tokens_per_s=num_rows * plan.tokens_per_row / round_s,
        tokens_per_round=plan.tokens_per_row,
        tokens_per_pass=plan.num_target_tokens,
        round_s=round_s,
        target_share=target_s / round_s,
        draft_share=draft_s / round_s,
        prefill_share=prefill_s / round_s,
        state_bytes_per_round=num_states * costs.state_bytes,
    )


def _shared_round(
    away_s: float,
    num_targets: int,
    burst_s: Callable[[int], float],
    *,
    is_ahead: bool,
    unshared_s: float,
) -> tuple[float, float]:
    """Seconds of a round of equal targets that share a draft, and of the draft's work in it.

    Those that wait when a burst is over make up the next one, and the draft waits for one more where that
    makes the round shorter (:mod:`specdist.engine.meetings`). So the targets fall into groups whose bursts
    follow one another, as many as are best.

    Args:
        away_s: from a reply to the next request.
        burst_s: of a burst for so many targets. A draft that works ahead replies before it, else after it.
        unshared_s: the part of ``away_s`` that a burst ahead for a single target adds to.
    """
    found: list[tuple[float, float]] = []
    for num_bursts in range(num_targets, 0, -1):
        bursts_s = [burst_s(len(part)) for part in np.array_split(np.arange(num_targets), num_bursts)]
        own_s = 0.0 if is_ahead else max(bursts_s)
        work_s = sum(bursts_s)
        # A single target asks again only when its reply has been used.
        busy_s = work_s + (unshared_s if num_targets == 1 else 0.0)
        found.append((max(away_s + own_s, busy_s), work_s))
    return min(found, key=lambda each: each[0])


def _round(costs: ReplicaCosts, settings: Settings) -> _Round:
    passes = costs.passes
    num_rows, length, acceptance = settings.num_rows, settings.num_draft_tokens, settings.acceptance
    if settings.mode == "target only" or not length:
        return _Round(num_rows, 1.0, lambda _: 0.0)
    if settings.is_ahead:
        caught = settings.caught_share
        ready = ready_share(acceptance, length, caught)
        tokens = tokens_per_pass_ahead(acceptance, length, caught)
        # The first step drafts the possible next token; the branches join in the others.
        first, others, num_others = 1.0, 1.0 + settings.num_branches, length
        num_target_tokens = num_rows * (1 + ready * length)
    else:
        tokens = tokens_per_call(acceptance, length)
        # If the whole block was accepted, the draft must still run its last token.
        first, others, num_others = 1 + acceptance**length, 1.0, length - 1
        if costs.state_bytes:
            # All that was accepted is run again, with the target's states.
            first = tokens
        num_target_tokens = num_rows * (1 + length)

    def draft_s(num_rows: int) -> float:
        later_s = num_others * _seconds(passes.draft, num_rows * others)
        return _seconds(passes.draft, num_rows * first) + later_s

    return _Round(num_target_tokens, tokens, draft_s)


def _prefill(
    costs: ReplicaCosts, settings: Settings, plan: _Round, prompt_tokens: int, num_prompts: float
) -> tuple[float, float]:
    """Seconds that prompts add to a round, on the target and on the draft; chunks join a pass."""
    if not prompt_tokens:
        return 0.0, 0.0
    tokens = num_prompts * prompt_tokens
    chunk = min(prompt_tokens * max(1.0, num_prompts), PREFILL_CHUNK_TOKENS)
    target = costs.target_prefill or costs.passes.target
    added_s = _seconds(target, plan.num_target_tokens + chunk) - _seconds(target, plan.num_target_tokens)
    if settings.mode == "target only":
        return tokens / chunk * added_s, 0.0
    return tokens / chunk * added_s, tokens / chunk * _seconds(costs.draft_prefill, chunk)


def _seconds(curve: Curve, size: float) -> float:
    return float(curve(size)) / NS_PER_S
