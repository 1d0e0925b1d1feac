"""Predicted throughput of a replica, from the costs of its passes, if tokens are accepted independently.

The closed form of a steady state, in which the next prompt follows each sequence that ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specdist.data.stats.regression import NS_PER_S
from specdist.policies.costs import CostModel, Curve
from specdist.policies.formulas import asynchronous_round, branches_for, synchronous_round

# Prompts are cut into chunks of a pass's token budget.
PREFILL_CHUNK_TOKENS = 2048

Mode = Literal["target only", "colocated", "synchronous", "asynchronous", "branches", "n-grams", "auto"]
# Those of a draft model that are the same in every round.
MODES: tuple[Mode, ...] = ("target only", "colocated", "synchronous", "asynchronous", "branches")
OWN_GPU: tuple[Mode, ...] = ("synchronous", "asynchronous", "branches")


@dataclass(frozen=True)
class ReplicaCosts:
    """Times of a replica.

    Attributes:
        passes: of the target by its tokens, of the draft by sequences of one token each. Where it
            ``drafts_blocks``, a step only draws, and the pass over blocks is the synchronous part.
        draft_prefill: of the draft by the tokens of a prompt.
        round_s: of the host, for every round.
        proposal_s: of a proposal of any length: messages to the draft's rank and back, bookkeeping.
        state_bytes: of the target's states of one token, which a drafter reads; ``state_s``: seconds
            that these are on their way to a rank of its own.
        target_prefill: of the target by tokens without any that is sampled from; None: as ``passes``.
    """

    passes: CostModel
    draft_prefill: Curve
    round_s: float
    proposal_s: float
    state_bytes: int = 0
    state_s: float = 0.0
    drafts_blocks: bool = False
    target_prefill: Curve | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a target runs: ``num_rows`` running sequences, ``num_draft_tokens`` candidates per round, and the
    share of misses ``caught`` by branches in a mode that has them."""

    mode: Mode
    num_rows: int
    num_draft_tokens: int
    acceptance: float
    caught: float = 0.0

    @property
    def is_asynchronous(self) -> bool:
        return self.mode in ("asynchronous", "branches")

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
            the draft works ahead.
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
    """Tokens of the target's pass, new tokens per sequence, and seconds of the draft, without prompts."""

    num_target_tokens: float
    tokens_per_row: float
    draft_s: float


def predict(
    costs: ReplicaCosts, settings: Settings, *, prompt_tokens: int = 0, output_tokens: int = 1
) -> Prediction:
    """The steady state; of decoding alone without ``prompt_tokens``."""
    plan = _round(costs, settings)
    num_rows = settings.num_rows
    num_prompts = num_rows * plan.tokens_per_row / output_tokens
    target_s = _seconds(costs.passes.target, plan.num_target_tokens)
    prefill_s, draft_prefill_s = _prefill(costs, settings, plan, prompt_tokens, num_prompts)
    target_s += prefill_s
    round_s, draft_s = costs.round_s + target_s, 0.0
    num_states = 0.0 if settings.mode == "target only" else num_rows * plan.tokens_per_row
    num_states += num_prompts * prompt_tokens if num_states else 0.0
    if settings.mode != "target only":
        round_s += costs.proposal_s
        draft_s = plan.draft_s + draft_prefill_s
    if settings.mode in OWN_GPU:
        round_s += num_states * costs.state_s
    # Ahead the draft works while the target does, but not while the messages are on their way.
    round_s = max(round_s, draft_s + (round_s - target_s)) if settings.is_asynchronous else round_s + draft_s
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


def _round(costs: ReplicaCosts, settings: Settings) -> _Round:
    passes = costs.passes
    num_rows, length, acceptance = settings.num_rows, settings.num_draft_tokens, settings.acceptance
    if settings.mode == "target only" or not length:
        return _Round(num_rows, 1.0, 0.0)
    if settings.is_asynchronous:
        work = asynchronous_round(acceptance, length, settings.caught_share, settings.num_branches)
    else:
        work = synchronous_round(acceptance, length)
        if costs.state_bytes:
            # All that was accepted is run again, with the target's states.
            work = work._replace(num_first=work.num_tokens)
    if costs.drafts_blocks:
        # One pass over whole blocks, whatever is drawn of them.
        draft_s = _seconds(passes.synchronous, num_rows) + length * _seconds(passes.draft, num_rows)
        return _Round(num_rows * work.num_verified, work.num_tokens, draft_s)
    first_s, later_s = (_seconds(passes.draft, num_rows * size) for size in (work.num_first, work.num_later))
    return _Round(num_rows * work.num_verified, work.num_tokens, first_s + work.num_steps * later_s)


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
