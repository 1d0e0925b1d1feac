"""Rounds of speculative decoding in virtual time, as the run's own chooser and policy decide them.

Nothing else of a run is here: passes take the planner's times and hosts those that were seen, tokens are
accepted independently, in the second half of a run perhaps with another probability. Every sequence brings a
prompt beside those that run; what its context has more is shared. The decisions are made on measured costs,
as in a run: curves at one context, straight lines from there.

R slots, B branches, C tokens of several sequences, one after the other.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specdist.lab.plan.hardware import find_gpu
from specdist.lab.plan.job import open_model
from specdist.lab.plan.roofline import DRAFT_PASS, ROUND_S, TARGET_PASS, Placement
from specdist.models.sizes.sizes import ModelSize
from specdist.policies import (
    DraftFeatures,
    DraftSequences,
    Goodput,
    RoundContext,
    VerifiedBlocks,
    VerifiedTokens,
)
from specdist.policies.costs import BRANCH_COUNTS, ContextCosts, CostModel, Curve
from specdist.policies.formulas import caught_share
from specdist.policies.payoff import ALONE, RoundChooser, RoundShape
from specdist.utils.ranges import arange_segments

MAX_DRAFT_TOKENS = 20
CONTEXT_STEP = 8
# Of a request and its reply; and of the draft's host beside the steps of synchronous and asynchronous rounds.
MESSAGE_NS, SYNCHRONOUS_NS, ASYNCHRONOUS_NS = 300_000, 600_000, 2_000_000
# Of a sequence that begins; the rest of its context is shared with others.
PROMPT_TOKENS = 500
ROWS_PER_SLOT, FEWEST_ROWS = 1.5, 12
SHORTEST, LONGEST = 200, 600
# What the draft's distribution says of every token: nothing.
ENTROPY, PROBABILITY, TOP_PROBABILITY = 0.7, 0.6, 0.7


@dataclass(frozen=True, kw_only=True)
class Setting:
    """``acceptance`` of the first and of the second half; ``catching``: misses caught, as a share of what
    :func:`caught_share` says; ``num_rows``: 0 = by the slots."""

    num_slots: int
    context_tokens: int
    acceptance: tuple[float, float]
    catching: float = 1.0
    seed: int = 0
    num_rows: int = 0


@dataclass(frozen=True)
class Machine:
    """A pair of models on its GPUs."""

    target: Placement
    draft: Placement

    @staticmethod
    def of(target: str, draft: str, gpu: str, tp_size: int) -> Machine:
        def placement(name: str, ranks: int, is_target: bool) -> Placement:
            size: ModelSize
            size, dtype = open_model("--target" if is_target else "--draft", name, "bfloat16")
            counts = TARGET_PASS if is_target else DRAFT_PASS
            return Placement(
                model=size, gpu=find_gpu(gpu, dtype), tp_size=ranks, context_tokens=0.0, counts=counts
            )

        return Machine(placement(target, tp_size, True), placement(draft, 1, False))

    def target_ns(self, num_tokens: float, num_rows: float, context: float) -> float:
        return _pass_ns(self.target, num_tokens, num_rows, round(context / CONTEXT_STEP))

    def draft_ns(self, num_rows: float, context: float) -> float:
        return _pass_ns(self.draft, num_rows, num_rows, round(context / CONTEXT_STEP))

    def measured(self, num_slots: int, context: int) -> CostModel:
        """As a run measures them at its start."""
        largest, widest = num_slots * (MAX_DRAFT_TOKENS + 1), num_slots * (1 + BRANCH_COUNTS[-1])
        sizes, draft_sizes = _powers(largest), _powers(widest)
        other = max(2 * context, 1024)
        per_block = MAX_DRAFT_TOKENS + 1

        def slope(tokens: int, rows: int) -> float:
            more = self.target_ns(tokens, rows, other) - self.target_ns(tokens, rows, context)
            return more / (other - context) * 1000 / num_slots

        one, several = slope(num_slots, num_slots), slope(largest, num_slots)
        per_token = min(max(0.0, (several - one) / (per_block - 1)), one)
        longer_ns = self.draft_ns(num_slots, other) - self.draft_ns(num_slots, context)
        per_draft_row = longer_ns / (other - context) * 1000 / num_slots
        return CostModel(
            Curve(sizes, [round(self.target_ns(size, min(size, num_slots), context)) for size in sizes]),
            Curve(draft_sizes, [round(self.draft_ns(size, context)) for size in draft_sizes]),
            ContextCosts(
                context,
                num_slots,
                one - per_token,
                per_token,
                per_draft_row,
            ),
            *(Curve([1], [ns]) for ns in (MESSAGE_NS, SYNCHRONOUS_NS, ASYNCHRONOUS_NS)),
        )


@functools.lru_cache(maxsize=2**18)
def _pass_ns(placement: Placement, num_tokens: float, num_rows: float, num_steps: int) -> float:
    """At a context of so many :data:`CONTEXT_STEP`, of which the planner's answers are kept."""
    at = dataclasses.replace(placement, context_tokens=num_steps * CONTEXT_STEP)
    return at.pass_s(num_tokens, num_rows) * 1e9 if num_tokens else 0.0


def _powers(largest: int) -> list[int]:
    return [1 << power for power in range((largest - 1).bit_length())] + [largest]


class Simulation:
    """One run. Without a chooser every round has the given shape, and blocks the given length."""

    def __init__(
        self,
        machine: Machine,
        setting: Setting,
        *,
        chooser: RoundChooser | None = None,
        policy: Goodput | None = None,
        shape: RoundShape = ALONE,
        length: int = 0,
    ) -> None:
        self._machine, self._setting = machine, setting
        self._chooser, self._policy = chooser, policy
        self._shape, self._length = shape, length
        lengths = np.random.default_rng(setting.seed + 1)
        num_rows = setting.num_rows or max(FEWEST_ROWS, round(ROWS_PER_SLOT * setting.num_slots))
        self._waiting = lengths.integers(SHORTEST, LONGEST + 1, num_rows).tolist()
        self._num_tokens = sum(self._waiting)
        # By row and place in its completion: what decides whether a token there is accepted, and whether a
        # branch has caught it. They are the same whatever is chosen, so that choices differ by no chance.
        coins = np.random.default_rng(setting.seed)
        self._coins_WL = coins.random((num_rows, LONGEST + MAX_DRAFT_TOKENS + 2))
        self._catches_WL = coins.random((num_rows, LONGEST + 1))
        num = setting.num_slots
        self._row_of, self._place = np.zeros(num, int), np.zeros(num, int)
        # By slot: tokens still to come, committed, ready candidates, tokens ahead, whether the draft lags.
        self._left, self._context = np.zeros(num, int), np.zeros(num, int)
        self._ready, self._ahead, self._lags = np.zeros(num, int), np.zeros(num, int), np.zeros(num, bool)
        self._branch_lengths = np.zeros((num, BRANCH_COUNTS[-1]), int)
        self._num_branches = 0
        self._accepted = np.zeros(num, int)
        self._candidates = np.zeros(num, int)
        self._histories = np.zeros((num, 2))
        self._num_alone = self._num_prompt_tokens = 0
        self.shapes: dict[str, int] = {}

    def run(self) -> float:
        """Tokens per second."""
        total_ns, num_left = 0.0, self._num_tokens
        while True:
            for slot in np.flatnonzero(self._left == 0):
                self._ready[slot] = self._ahead[slot] = self._candidates[slot] = self._accepted[slot] = 0
                self._histories[slot] = 0
                if self._waiting:
                    self._row_of[slot], self._place[slot] = len(self._coins_WL) - len(self._waiting), 0
                    self._left[slot] = self._waiting.pop(0)
                    self._context[slot] = self._setting.context_tokens
                    self._num_prompt_tokens += min(PROMPT_TOKENS, self._setting.context_tokens)
            rows = np.flatnonzero(self._left)
            if not len(rows):
                return self._num_tokens / total_ns * 1e9
            if num_left == self._num_tokens:
                # The first prompts have passes of their own, which are the same whatever is chosen.
                self._num_prompt_tokens = 0
            is_first = num_left > self._num_tokens / 2
            spent_ns, num_new = self._round(rows, self._setting.acceptance[0 if is_first else 1])
            total_ns += spent_ns + ROUND_S * 1e9
            num_left -= num_new

    def _round(self, rows: np.ndarray, acceptance: float) -> tuple[float, int]:
        if self._num_alone:
            self._num_alone -= 1
            self._note("alone")
            return self._commit(rows, acceptance, 0.0, 0.0, is_asked=False)
        learn = self._resolve(rows, acceptance)
        context = float(self._context[rows].mean())
        if self._chooser is not None:
            self._shape = self._chooser.shape(len(rows), context, is_pending=bool(self._ready[rows].any()))
            self._num_alone = self._shape.num_rounds_alone
        shape = self._shape
        ahead = f"asynchronous{shape.num_ahead - 1}/{shape.num_branches}"
        self._note("synchronous" if shape.drafts_now else ahead)
        is_asked = self._chooser is not None or shape != ALONE
        round_of = RoundContext(
            num_rows=len(rows),
            num_pass_tokens=len(rows) + self._num_prompt_tokens,
            num_context_tokens=context,
            is_asynchronous=False,
        )
        now_ns = SYNCHRONOUS_NS * shape.drafts_now
        if shape.drafts_now:
            learn()
            room = np.minimum(MAX_DRAFT_TOKENS, self._left[rows] - 1) - self._ready[rows]
            drafted, spent_ns = self._draft(
                rows, rows, np.maximum(0, room), np.ones(len(rows)), round_of, context
            )
            now_ns += spent_ns
            self._ready[rows] += drafted
        self._candidates[rows] = self._ready[rows]
        if shape.num_ahead and self._policy is not None:
            kept = self._policy.num_to_verify(
                _features(int(self._ready[rows].sum())), self._ready[rows], round_of
            )
            self._candidates[rows] = kept
        self._ahead[rows] = self._ready[rows] - self._candidates[rows]
        if not shape.drafts_now:
            learn()
        if self._chooser is not None:
            self._chooser.choose(len(rows), context)
            is_pending = bool(self._candidates[rows].any())
            self._shape = self._chooser.shape_ahead(shape, is_pending=is_pending)
        ahead_ns = self._draft_ahead(rows, context) if self._shape.num_ahead else 0.0
        return self._commit(rows, acceptance, now_ns, ahead_ns, is_asked=is_asked)

    def _resolve(self, rows: np.ndarray, acceptance: float) -> Callable[[], None]:
        """How the last pass ended: what is ready becomes known. What is returned lets the policy and the
        chooser learn."""
        full = self._accepted[rows] == self._candidates[rows]
        is_verified = full & (self._ahead[rows] > 0)
        # Of the next tokens, in whose places the first ones ahead stand.
        own, places = self._row_of[rows], self._place[rows]
        is_hit = is_verified & (self._coins_WL[own, places] < acceptance)
        is_rejected = (~full | is_verified) & ~is_hit
        ready = np.where(is_hit, self._ahead[rows] - 1, 0)
        caught, num_branches = 0, self._num_branches
        if num_branches:
            shares = self._setting.catching * np.array([caught_share(n) for n in range(num_branches + 1)])
            which = np.searchsorted(shares, self._catches_WL[own, places], side="right") - 1
            is_caught = is_rejected & (which < num_branches)
            which = np.minimum(which, num_branches - 1)
            ready = np.where(is_caught, self._branch_lengths[rows, which], ready)
            caught = int(is_caught.sum())
        candidates, accepted = self._candidates[rows], self._accepted[rows]
        self._ready[rows] = np.minimum(ready, np.maximum(0, self._left[rows] - 1))
        self._accepted[rows] = self._candidates[rows] = self._ahead[rows] = 0
        self._num_branches = 0

        def learn() -> None:
            if self._chooser is not None:
                self._chooser.observe(accepted + is_hit, is_rejected)
                self._chooser.observe_misses(num_branches, int((~is_hit).sum()), caught)
            if self._policy is not None:
                self._teach(rows, candidates, accepted, accepted + is_hit, is_rejected)

        return learn

    def _teach(
        self,
        rows: np.ndarray,
        candidates: np.ndarray,
        accepted: np.ndarray,
        num_kept: np.ndarray,
        is_rejected: np.ndarray,
    ) -> None:
        """Let the policy learn from these rows' blocks; kept: with the first tokens ahead."""
        assert self._policy is not None
        verified = np.flatnonzero(candidates)
        slots = rows[verified]
        self._histories[slots] = self._policy.next_histories(
            VerifiedBlocks(
                histories_RH=self._histories[slots],
                num_drafted_R=candidates[verified],
                num_accepted_R=accepted[verified],
            )
        )
        lengths = num_kept + is_rejected
        depths = arange_segments(lengths)
        self._policy.observe_tokens(
            VerifiedTokens(
                features=_features(len(depths)),
                depths_C=depths,
                is_accepted_C=depths < np.repeat(num_kept, lengths),
            )
        )

    def _draft(
        self,
        draft_slots: np.ndarray,
        slots: np.ndarray,
        most: np.ndarray,
        reach: np.ndarray,
        round_of: RoundContext,
        context: float,
    ) -> tuple[np.ndarray, float]:
        """Tokens drafted for each, and the time."""
        drafted, active, spent_ns = np.zeros(len(slots), int), np.flatnonzero(most > 0), 0.0
        for depth in itertools.count():
            active = active[most[active] > depth]
            if self._policy is None:
                wants = np.full(len(active), depth < self._length)
            elif len(active):
                lengths = self._policy.wants(
                    DraftSequences(
                        slots_R=slots[active],
                        draft_slots_R=draft_slots[active],
                        histories_RH=self._histories[slots[active]],
                        num_drafted=depth,
                        features=_features(1, len(active)) if depth else None,
                        reach_R=reach[active],
                        round=round_of,
                    )
                )
                wants = lengths > depth
            else:
                break
            active = active[wants]
            if not len(active):
                break
            lagging = 0 if depth or round_of.is_asynchronous else int(self._lags[slots[active]].sum())
            spent_ns += self._machine.draft_ns(len(active) + lagging, context)
            drafted[active] += 1
        return drafted, spent_ns

    def _draft_ahead(self, rows: np.ndarray, context: float) -> float:
        shape = self._shape
        has_left = self._ahead[rows] > 0
        spent_ns = self._machine.draft_ns(len(rows), context) + ASYNCHRONOUS_NS * (shape.num_ahead > 1)
        self._ahead[rows] += ~has_left
        more = np.maximum(shape.num_ahead - self._ahead[rows], 0)
        num_branches = shape.num_branches if shape.num_ahead > 1 else 0
        round_of = RoundContext(
            num_rows=len(rows),
            num_pass_tokens=len(rows) + int(self._candidates[rows].sum()) + self._num_prompt_tokens,
            num_context_tokens=context,
            is_asynchronous=True,
            most_tokens=shape.num_ahead - 1,
        )
        branches = np.repeat(rows, num_branches)
        places = np.tile(np.arange(num_branches), len(rows))
        estimate = 0.7 if self._chooser is None else self._chooser.acceptance
        gains = np.diff([caught_share(count) for count in range(num_branches + 1)])
        misses = 1 - estimate ** (self._candidates[rows] + 1.0)
        drafted, more_ns = self._draft(
            np.r_[rows, self._setting.num_slots + branches * BRANCH_COUNTS[-1] + places],
            np.r_[rows, branches],
            np.r_[more, np.full(len(branches), shape.num_ahead - 1)],
            np.r_[np.ones(len(rows)), (misses[:, None] * gains).ravel()],
            round_of,
            context,
        )
        self._ahead[rows] += drafted[: len(rows)]
        self._num_branches = num_branches
        self._branch_lengths[branches, places] = drafted[len(rows) :]
        return spent_ns + more_ns

    def _commit(
        self, rows: np.ndarray, acceptance: float, now_ns: float, ahead_ns: float, *, is_asked: bool
    ) -> tuple[float, int]:
        """The target's pass: the time of the round, and the tokens that it commits."""
        candidates = self._candidates[rows]
        # After the next tokens.
        places = self._place[rows, None] + np.arange(1, MAX_DRAFT_TOKENS + 2)
        coins = self._coins_WL[self._row_of[rows, None], places] < acceptance
        accepted = np.minimum(np.cumprod(coins, axis=1).sum(axis=1), candidates)
        num_new = np.minimum(accepted + 1, self._left[rows])
        context = float(self._context[rows].mean())
        size = len(rows) + int(candidates.sum()) + self._num_prompt_tokens
        pass_ns = self._machine.target_ns(size, len(rows), context)
        if self._chooser is not None:
            self._chooser.observe_pass(self._num_prompt_tokens, int(num_new.sum()))
        self._num_prompt_tokens = 0
        self._accepted[rows] = accepted
        self._lags[rows] = accepted == candidates
        self._left[rows] -= num_new
        self._place[rows] += num_new
        self._context[rows] += num_new
        return now_ns + max(pass_ns, ahead_ns) + MESSAGE_NS * is_asked, int(num_new.sum())

    def _note(self, shape: str) -> None:
        self.shapes[shape] = self.shapes.get(shape, 0) + 1


def _features(*shape: int) -> DraftFeatures:
    return DraftFeatures(*(np.full(shape, value) for value in (ENTROPY, PROBABILITY, TOP_PROBABILITY)))
