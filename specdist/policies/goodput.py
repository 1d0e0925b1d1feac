"""Goodput: draft and verify what pays for the whole batch, by what passes cost and what is likely accepted.

In the spirit of TurboSpec and SmartSpec. A token at depth i of a row is worth the probability that all up to
it are accepted, and a round is worth what it commits. Wanted is the largest number of tokens per second of
the batch, g: further steps for some rows pay if the tokens that they add exceed g times the time that they
add (Dinkelbach's criterion for a ratio), looking ahead as many steps as there may be, for time is not a
straight line and the first token of a block may cost what five do.

- In turns, a round takes its draft steps and the target's pass; g is that of a round of equal blocks without
  any prompt in it, since what a prompt takes is to be paid in any case. Whether to stop is decided before a
  token is drawn, by the tokens before it; no drawn token is ever left out.
- A draft that works ahead has the time of the target's pass for nothing, and only what exceeds it costs. What
  is ready need not be verified at once: a token left out stays in the chain as one drafted ahead, and is
  verified by the same rule a round later, so that leaving it out may depend on its value without any bias.

A trained acceptance head, where there is one, knows more of a token than its features do, but only after the
pass over it, which draws the next one. So the last token of a block is verified by its features, and those
before it by the head's word as well, calibrated on what the target has said of other tokens.

No threshold is to be tuned. R rows asked about, D steps, C tokens of several rows, one row after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from specdist.policies.base import DraftedRows, DraftFeatures, VerifiedBlocks, VerifiedTokens
from specdist.policies.calibration import NUM_FEATURES, AcceptanceModel, token_features, with_head
from specdist.policies.costs import CostModel
from specdist.policies.options import MAX_DRAFT_TOKENS, HeadKind, OptionInfo, RegisteredPolicy
from specdist.policies.references import Reference

# What is assumed of the next token before any was verified, and after how many tokens half of it is
# forgotten.
PRIOR_ACCEPTANCE = 0.7
FORECAST_MEMORY = 256
# The same of rounds that drafted nothing and so teach nothing: where it did not pay, it is tried again.
IDLE_MEMORY = 2048
# What the batch tells of a row is worth so many tokens of its own, of which half are forgotten after so many.
ROW_PRIOR_TOKENS = 32
ROW_MEMORY = 64
LARGEST_FORECAST = 0.98


LIU_2024 = Reference(
    authors="Liu, Park, Hu, Kwon, Li, Zhang, Du, Mo, You, Cheung, Deng, Stoica, Zhang",
    year=2024,
    title="TurboSpec: Closed-loop Speculation Control System for Optimizing LLM Serving "
    "Goodput (first published as SmartSpec: Optimizing Speculative Decoding for "
    "Serving Large Language Models Using Goodput)",
    arxiv="2406.14066",
)


class Goodput(RegisteredPolicy):
    """Knows the whole batch: block lengths depend on what else is in flight.

    A row's history is how many of its tokens were accepted, and how many verified, both fading.
    """

    name: ClassVar[str] = "goodput"
    drafts: ClassVar[str] = (
        "what pays for the whole batch: measured costs of passes against learned chances of acceptance; "
        "nothing where nothing pays"
    )
    papers: ClassVar[tuple[Reference, ...]] = (LIU_2024,)
    own_options: ClassVar[Mapping[str, OptionInfo]] = {"max_draft_tokens": MAX_DRAFT_TOKENS}
    needs_costs: ClassVar[bool] = True
    optional_head: ClassVar[HeadKind | None] = "acceptance"
    uses_features: ClassVar[bool] = True

    def __init__(
        self, *, max_draft_tokens: int, costs: CostModel, is_coupled: bool, reads_head: bool = False
    ) -> None:
        """
        Args:
            is_coupled: target and draft draw with the same noise, or without any (greedy).
            reads_head: the draft carries an acceptance head.
        """
        self.max_draft_tokens = max_draft_tokens
        self._target_ns, self._draft_ns = costs.target.look_up, costs.draft.look_up
        self.reads_head = reads_head
        self._acceptance = AcceptanceModel(is_coupled=is_coupled)
        # Of tokens of which a head has given its estimate.
        self._acceptance_by_head = AcceptanceModel(is_coupled=is_coupled, has_head=True)
        # Of a token that is not drawn yet.
        self._forecast = PRIOR_ACCEPTANCE
        # Expected tokens per nanosecond of the round.
        self._goodput = 0.0
        # So many rows with so many steps more: their tokens, and the time of the steps.
        self._steps_D = np.arange(1, max_draft_tokens + 1)
        self._tokens_RD = np.zeros((0, max_draft_tokens), np.int64)
        self._drafting_RD = np.zeros((0, max_draft_tokens))
        # Of the draft batch: what each chain is still worth, its candidates, and the time of its steps.
        self._survival = np.zeros(0)
        # Expected accepted tokens among the next 1, 2, .. of a chain.
        self._worth = np.zeros((0, max_draft_tokens))
        # With a head: the same but for the last token, and what is known of that one.
        self._resolved = np.zeros(0)
        self._last = np.zeros((0, NUM_FEATURES))
        self._num_tokens = 0
        self._drafting_ns = 0.0

    @property
    def initial_history(self) -> tuple[float, ...]:
        return 0.0, 0.0

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        accepted_R = blocks.num_accepted_R
        verified_R = accepted_R + (accepted_R < blocks.num_drafted_R)
        histories_RH = blocks.histories_RH * (0.5 ** (verified_R / ROW_MEMORY))[:, None]
        histories_RH[:, 0] += accepted_R
        histories_RH[:, 1] += verified_R
        return histories_RH

    def wants_more(self, rows: DraftedRows) -> np.ndarray:
        if rows.num_drafted == 0:
            self._begin(rows)
        elif rows.features is not None:
            self._go_on(rows, rows.features)
        wants_R = self._rows_that_pay(rows)
        num_wanted = int(wants_R.sum())
        self._num_tokens += num_wanted
        self._drafting_ns += float(self._draft_ns(num_wanted))
        return wants_R

    def num_to_verify(
        self, features: DraftFeatures, lengths_R: np.ndarray, num_other_tokens: int
    ) -> np.ndarray:
        """[R]: how many of each row's ready tokens are worth the target's time.

        Args:
            features: of the ready tokens.
            num_other_tokens: in the target's pass beside them.
        """
        lines_C = np.repeat(np.arange(len(lengths_R)), lengths_R)
        starts_R = np.cumsum(lengths_R) - lengths_R
        depths_C = np.arange(len(lines_C)) - starts_R[lines_C]
        logs_C = np.cumsum(np.log(self._chances(features, depths_C)))
        before_R = np.r_[0.0, logs_C][starts_R]
        survival_C = np.exp(logs_C - before_R[lines_C])
        # Survival falls along a row, so that the best tokens of all are every row's first ones.
        order_C = np.argsort(-survival_C, kind="stable")
        num_tokens = len(lengths_R) + np.r_[0.0, np.cumsum(survival_C[order_C])]
        pass_ns = self._target_ns(num_other_tokens + np.arange(len(lines_C) + 1))
        rates = num_tokens / np.maximum(1.0, np.maximum(pass_ns, self._drafting_ns))
        best = int(np.argmax(rates))
        self._goodput = float(rates[best])
        return np.bincount(lines_C[order_C[:best]], minlength=len(lengths_R))

    def observe_tokens(self, tokens: VerifiedTokens) -> None:
        """Learn from the tokens that the target has verified."""
        if not len(tokens.depths_C):
            return
        known_CF = _known(tokens.features, tokens.depths_C)
        self._acceptance.observe(known_CF, tokens.is_accepted_C)
        judged, found_CF = self._told_by_head(tokens.features, known_CF)
        self._acceptance_by_head.observe(found_CF, tokens.is_accepted_C[judged])
        kept = 0.5 ** (len(tokens.depths_C) / FORECAST_MEMORY)
        self._forecast = kept * self._forecast + (1 - kept) * float(tokens.is_accepted_C.mean())

    def _begin(self, rows: DraftedRows) -> None:
        """A draft batch begins: in turns, with the best that a round of equal blocks could give."""
        size = int(rows.draft_rows_R.max(initial=-1)) + 1
        if size > len(self._survival):
            self._survival, self._resolved = np.zeros(size), np.zeros(size)
            self._worth = np.zeros((size, self.max_draft_tokens))
            self._last = np.zeros((size, NUM_FEATURES))
        self._survival[rows.draft_rows_R] = self._resolved[rows.draft_rows_R] = rows.reach_R
        forecast_R = self._row_forecasts(rows.histories_RH)
        self._worth[rows.draft_rows_R] = (forecast_R[:, None] ** self._steps_D).cumsum(axis=1)
        if not self._num_tokens:
            self._forecast += (PRIOR_ACCEPTANCE - self._forecast) * (1 - 0.5 ** (1 / IDLE_MEMORY))
        self._num_tokens = 0
        self._drafting_ns = 0.0
        if rows.round.is_ahead:
            # The next tokens' own step is over.
            self._drafting_ns = float(self._draft_ns(rows.round.num_rows))
            return
        num_rows = len(rows.draft_rows_R)
        num_tokens_D = rows.round.num_rows + num_rows * (self._forecast**self._steps_D).cumsum()
        ns_D = self._steps_D * self._draft_ns(num_rows)
        ns_D = ns_D + self._target_ns(rows.round.num_rows + num_rows * self._steps_D)
        undrafted = rows.round.num_rows / max(1.0, float(self._target_ns(rows.round.num_rows)))
        self._goodput = max(undrafted, float((num_tokens_D / np.maximum(1.0, ns_D)).max()))

    def _go_on(self, rows: DraftedRows, features: DraftFeatures) -> None:
        """Every chain has one token more; and of the one before it a head may have given its estimate."""
        draft_rows_R = rows.draft_rows_R
        known_RF = _known(features, np.full(len(draft_rows_R), rows.num_drafted - 1))
        chances_R = self._acceptance.predict(known_RF)
        if not self.reads_head:
            self._survival[draft_rows_R] *= chances_R
            return
        if rows.earlier_estimates_R is not None:
            found_RF = with_head(self._last[draft_rows_R], rows.earlier_estimates_R)
            self._resolved[draft_rows_R] *= self._acceptance_by_head.predict(found_RF)
        self._last[draft_rows_R] = known_RF
        self._survival[draft_rows_R] = self._resolved[draft_rows_R] * chances_R

    def _rows_that_pay(self, rows: DraftedRows) -> np.ndarray:
        """bool [R]: those of the best plan of so many rows and so many steps more, if it pays at all."""
        num_rows, num_steps = len(rows.draft_rows_R), self.max_draft_tokens - rows.num_drafted
        if not num_rows or num_steps <= 0:
            return np.zeros(num_rows, bool)
        worth_RD = self._survival[rows.draft_rows_R, None] * self._worth[rows.draft_rows_R, :num_steps]
        order_R = (-worth_RD[:, 0]).argsort(kind="stable")
        value_RD = worth_RD[order_R].cumsum(axis=0)
        value_RD -= self._goodput * self._plan_ns(rows, num_steps)
        best_row, best_step = divmod(int(value_RD.argmax()), num_steps)
        wants_R = np.zeros(num_rows, bool)
        if value_RD[best_row, best_step] > 0:
            wants_R[order_R[: best_row + 1]] = True
        return wants_R

    def _plan_ns(self, rows: DraftedRows, num_steps: int) -> np.ndarray:
        """[R, D]: the time that is added by 1, 2, .. of the rows with 1, 2, .. steps more."""
        num_rows = len(rows.draft_rows_R)
        if num_rows > len(self._tokens_RD):
            counts_R = np.arange(1, num_rows + 1)
            self._tokens_RD = counts_R[:, None] * self._steps_D
            self._drafting_RD = self._draft_ns(counts_R)[:, None] * self._steps_D
        drafting_RD = self._drafting_RD[:num_rows, :num_steps]
        if rows.round.is_ahead:
            free_ns = float(self._target_ns(rows.round.num_pass_tokens))
            over_ns = max(0.0, self._drafting_ns - free_ns)
            return np.maximum(0.0, drafting_RD + (self._drafting_ns - free_ns)) - over_ns
        num_tokens = rows.round.num_pass_tokens + self._num_tokens
        verifying_RD = self._target_ns(num_tokens + self._tokens_RD[:num_rows, :num_steps])
        return drafting_RD + verifying_RD - self._target_ns(num_tokens)

    def _row_forecasts(self, histories_RH: np.ndarray) -> np.ndarray:
        """[R]: how likely a token of the row is accepted that is not drawn yet."""
        accepted_R, verified_R = histories_RH.T
        forecast_R = (ROW_PRIOR_TOKENS * self._forecast + accepted_R) / (ROW_PRIOR_TOKENS + verified_R)
        return np.minimum(forecast_R, LARGEST_FORECAST)

    def _chances(self, features: DraftFeatures, depths_C: np.ndarray) -> np.ndarray:
        known_CF = _known(features, depths_C)
        chances_C = self._acceptance.predict(known_CF)
        judged, found_CF = self._told_by_head(features, known_CF)
        if len(judged):
            chances_C[judged] = self._acceptance_by_head.predict(found_CF)
        return chances_C

    def _told_by_head(self, features: DraftFeatures, known_CF: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens whose estimate is known, and what is known of these with it."""
        if not self.reads_head or features.estimates_R is None:
            return np.zeros(0, np.int64), np.zeros((0, NUM_FEATURES + 1))
        judged = np.flatnonzero(~np.isnan(features.estimates_R))
        return judged, with_head(known_CF[judged], features.estimates_R[judged])


def _known(features: DraftFeatures, depths_C: np.ndarray) -> np.ndarray:
    return token_features(
        features.entropies_R, features.probabilities_R, features.top_probabilities_R, depths_C
    )
