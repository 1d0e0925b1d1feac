"""Predicted throughput of a replica, from the costs of its passes, if tokens are accepted independently.

The closed form of a steady state, in which the next prompt follows each sequence that ends. For the start
and the end of a job see :mod:`specdist.planning.events`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specdist.policies.costs import CostModel, Curve
from specdist.stats.regression import NS_PER_S
from specdist.theory.formulas import branches_for, ready_share, tokens_per_call, tokens_per_pass_ahead

# Prompts are cut into chunks of a pass's token budget.
PREFILL_CHUNK_TOKENS = 2048

Mode = Literal["target only", "colocated", "in turns", "ahead", "branches", "auto"]
# Those that are the same in every round.
MODES: tuple[Mode, ...] = ("target only", "colocated", "in turns", "ahead", "branches")


@dataclass(frozen=True)
class ReplicaCosts:
    """Times of a replica.

    Attributes:
        passes: of the target by its tokens, of the draft by sequences of one token each.
        draft_prefill: of the draft by the tokens of a prompt.
        round_s: of the host, for every round.
        proposal_s: of a proposal of any length: messages to the draft's rank and back, bookkeeping.
    """

    passes: CostModel
    draft_prefill: Curve
    round_s: float
    proposal_s: float


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a replica runs: ``num_rows`` running sequences, ``num_draft_tokens`` candidates per round, and the
    share of misses ``caught`` by branches in a mode that has them."""

    mode: Mode
    num_rows: int
    num_draft_tokens: int
    acceptance: float
    caught: float = 0.0

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
    """A replica in its steady state.

    Attributes:
        tokens_per_round: new tokens of one sequence.
        tokens_per_pass: run by the target for all sequences, without prompts.
        target_share, draft_share: shares of the time in which each works, with prompts; ahead they overlap.
        prefill_share: share of the time for prompts on the target.
    """

    tokens_per_s: float
    tokens_per_round: float
    tokens_per_pass: float
    round_s: float
    target_share: float
    draft_share: float
    prefill_share: float


@dataclass(frozen=True)
class _Round:
    """Tokens of the target's pass, new tokens per sequence, and the draft's time, without prompts."""

    num_target_tokens: float
    tokens_per_row: float
    draft_s: float


def predict(
    costs: ReplicaCosts, settings: Settings, *, prompt_tokens: int = 0, output_tokens: int = 1
) -> Prediction:
    """The steady state; of decoding alone without ``prompt_tokens``."""
    plan = _round(costs.passes, settings)
    num_prompts = settings.num_rows * plan.tokens_per_row / output_tokens
    decode_s = _seconds(costs.passes.target, plan.num_target_tokens)
    prefill_s, draft_prefill_s = _prefill(costs, settings, plan, prompt_tokens, num_prompts)
    target_s, draft_s = decode_s + prefill_s, plan.draft_s + draft_prefill_s
    round_s = costs.round_s + (max(target_s, draft_s) if settings.is_ahead else target_s + draft_s)
    if settings.mode != "target only":
        round_s += costs.proposal_s
    return Prediction(
        tokens_per_s=settings.num_rows * plan.tokens_per_row / round_s,
        tokens_per_round=plan.tokens_per_row,
        tokens_per_pass=plan.num_target_tokens,
        round_s=round_s,
        target_share=target_s / round_s,
        draft_share=draft_s / round_s,
        prefill_share=prefill_s / round_s,
    )


def _round(passes: CostModel, settings: Settings) -> _Round:
    num_rows, length, acceptance = settings.num_rows, settings.num_draft_tokens, settings.acceptance
    if settings.mode == "target only" or not length:
        return _Round(num_rows, 1.0, 0.0)
    if settings.is_ahead:
        caught = settings.caught_share
        ready = ready_share(acceptance, length, caught)
        draft_rows = num_rows * (1 + settings.num_branches)
        # The first step drafts the possible next token; the branches join in the others.
        draft_s = _seconds(passes.draft, num_rows) + length * _seconds(passes.draft, draft_rows)
        tokens = tokens_per_pass_ahead(acceptance, length, caught)
        return _Round(num_rows * (1 + ready * length), tokens, draft_s)
    # If the whole block was accepted, the draft must still run its last token.
    first = num_rows * (1 + acceptance**length)
    draft_s = _seconds(passes.draft, first) + (length - 1) * _seconds(passes.draft, num_rows)
    return _Round(num_rows * (1 + length), tokens_per_call(acceptance, length), draft_s)


def _prefill(
    costs: ReplicaCosts, settings: Settings, plan: _Round, prompt_tokens: int, num_prompts: float
) -> tuple[float, float]:
    """Seconds that prompts add to a round, on the target and on the draft; chunks join a pass."""
    if not prompt_tokens:
        return 0.0, 0.0
    tokens = num_prompts * prompt_tokens
    chunk = min(prompt_tokens * max(1.0, num_prompts), PREFILL_CHUNK_TOKENS)
    target = costs.passes.target
    added_s = _seconds(target, plan.num_target_tokens + chunk) - _seconds(target, plan.num_target_tokens)
    if settings.mode == "target only":
        return tokens / chunk * added_s, 0.0
    return tokens / chunk * added_s, tokens / chunk * _seconds(costs.draft_prefill, chunk)


def _seconds(curve: Curve, size: float) -> float:
    return float(curve(size)) / NS_PER_S
