"""Goodput: draft and verify what pays for the whole batch, by measured costs and estimated acceptance.

After TurboSpec and SmartSpec. A token at depth i of a block is worth the probability that all tokens up to it
are accepted, and a round is worth the tokens that it commits. The goal is the largest number of tokens per
second of the batch, g: further steps for some sequences pay if the tokens that they add exceed g times the
time that they add (Dinkelbach's criterion for a ratio). All numbers of further steps are compared, since time
is not linear in tokens: the first token of a block may cost as much as five.

- A synchronous round takes the time of its draft steps and of the target's pass; g is that of a round of
  equal blocks without prompts, since prompts cost the same in any case, with the acceptance of the sequences
  that are asked about: their tokens must come from them, at whatever rate others go. Whether to stop is
  decided before a token is drawn, by the tokens before it; no drawn token is ever left out.
- A draft that works ahead has the time of the target's pass for free; only time beyond it counts. Tokens that
  are ready need not be verified at once: one that is held back stays in the chain as a token drafted ahead,
  and is verified by the same rule a round later, so holding it back may depend on its value without any bias.
- One pass of a block drafter gives the distributions of a whole block. How many tokens are drawn of it is
  decided then, before the first draw, by the draft's confidence at every place, calibrated on verified
  tokens; g is the best rate that this round can reach.

No threshold needs tuning. R sequences to decide for, D steps, C tokens of several sequences, one after the
other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from specdist.policies.base import (
    DraftFeatures,
    DraftSequences,
    RoundContext,
    VerifiedBlocks,
    VerifiedTokens,
)
from specdist.policies.calibration import (
    PRIOR_WEIGHTS,
    PRIOR_WEIGHTS_OF_PLACES,
    AcceptanceModel,
    Forecast,
    place_features,
    token_features,
)
from specdist.policies.costs import CostModel, Sizes
from specdist.policies.lengths.exploration import cheapest_exploration
from specdist.policies.options import MAX_DRAFT_TOKENS, OptionInfo, RegisteredPolicy
from specdist.policies.payoff import worth_verifying

# Half-life of what a sequence's history has seen, in its verified tokens.
ROW_MEMORY = 64

LIU_2024 = (
    "Liu, Park, Hu, Kwon, Li, Zhang, Du, Mo, You, Cheung, Deng, Stoica, Zhang (2024). *TurboSpec: "
    "Closed-loop Speculation Control System for Optimizing LLM Serving Goodput (first published as "
    "SmartSpec: Optimizing Speculative Decoding for Serving Large Language Models Using Goodput)*. "
    "[arXiv:2406.14066](https://arxiv.org/abs/2406.14066)"
)


class Spent:
    """What a drafting has taken so far, and what further steps would add to its round.

    Attributes:
        num_tokens: drafted tokens of all sequences.
        drafting_ns, first_ns: time of drafting, and of it what came before these tokens' steps.
    """

    def __init__(self, costs: CostModel, max_draft_tokens: int) -> None:
        self._costs = costs
        self.num_tokens = self._num_steps = 0
        self.drafting_ns = self.first_ns = 0.0
        # For r sequences with d further steps each: their tokens, and the time of the steps, which was worked
        # out for a context of about this length (the logarithm of it).
        self._steps_D = np.arange(1, max_draft_tokens + 1)
        self._tokens_RD = np.zeros((0, max_draft_tokens), np.int64)
        self._drafting_RD = np.zeros((0, max_draft_tokens))
        self._context = 0.0

    def begin(self, round: RoundContext) -> None:
        """Another drafting begins."""
        self.num_tokens = self._num_steps = 0
        self.drafting_ns = 0.0
        if round.is_asynchronous:
            # The step that drafts in place of the next tokens is done; the host takes time, too.
            self.drafting_ns = self._costs.draft_ns(round.num_rows, round.num_context_tokens)
            self.drafting_ns += self._costs.asynchronous.look_up(round.num_rows)
        self.first_ns = self.drafting_ns

    def count_step(self, round: RoundContext, num_rows: int) -> None:
        """A step follows, of so many sequences."""
        self.num_tokens += num_rows
        self._num_steps += num_rows > 0
        self.drafting_ns += self._costs.draft_ns(num_rows, round.num_context_tokens)

    @property
    def step_ns(self) -> float:
        """Mean time of a step."""
        return (self.drafting_ns - self.first_ns) / max(1, self._num_steps)

    def target_ns(self, num_tokens: Sizes, round: RoundContext) -> Any:
        """A target pass in this round, of so many tokens."""
        return self._costs.target_ns(num_tokens, round.num_rows, round.num_context_tokens)

    def added_ns(self, round: RoundContext, num_rows: int, num_steps: int, *, is_first: bool) -> np.ndarray:
        """[R, S]: the time added by 1, 2, ... sequences with 1, 2, ... further steps."""
        context = float(f"{math.log2(1 + round.num_context_tokens):.1f}")
        if num_rows > len(self._tokens_RD) or context != self._context:
            counts_R = np.arange(1, max(num_rows, len(self._tokens_RD)) + 1)
            self._tokens_RD = counts_R[:, None] * self._steps_D
            draft_ns_R = self._costs.draft_ns(counts_R, round.num_context_tokens)
            self._drafting_RD = draft_ns_R[:, None] * self._steps_D
            self._context = context
        drafting_RS = self._drafting_RD[:num_rows, :num_steps]
        if round.is_asynchronous:
            over_ns = self.drafting_ns - self.target_ns(round.num_pass_tokens, round)
            return np.asarray(np.maximum(0.0, drafting_RS + over_ns) - max(0.0, over_ns))
        num_tokens = round.num_pass_tokens + self.num_tokens
        verifying_RS = self.target_ns(num_tokens + self._tokens_RD[:num_rows, :num_steps], round)
        added_RS = drafting_RS + verifying_RS - self.target_ns(num_tokens, round)
        if is_first:
            counts_R = np.arange(1, num_rows + 1)
            added_RS = added_RS + self._costs.synchronous_ns(counts_R, round.num_context_tokens)[:, None]
        return np.asarray(added_RS)


class Goodput(RegisteredPolicy):
    """Decides for the whole batch: block lengths depend on the other sequences in flight.

    A sequence's history is its numbers of accepted and of verified tokens, both decaying exponentially.
    """

    name = "goodput"
    drafts = (
        "what pays for the whole batch: measured costs of passes against learned chances of acceptance; "
        "nothing where nothing pays"
    )
    papers = (LIU_2024,)
    own_options: ClassVar[Mapping[str, OptionInfo]] = {"max_draft_tokens": MAX_DRAFT_TOKENS}
    needs_costs = True
    uses_features = True
    is_for_batch = True
    max_draft_tokens: int = 0

    def __init__(self, *, max_draft_tokens: int, costs: CostModel, is_coupled: bool) -> None:
        """``is_coupled``: target and draft draw with the same noise, or without any (greedy)."""
        self.max_draft_tokens = max_draft_tokens
        self._costs = costs
        self._acceptance = AcceptanceModel(PRIOR_WEIGHTS[is_coupled])
        # The model of places of a block drafter's blocks, if there is one.
        self._acceptance_at_places = AcceptanceModel(PRIOR_WEIGHTS_OF_PLACES)
        self._has_blocks = False
        self._forecast = Forecast()
        # Expected tokens per nanosecond of the round.
        self._goodput = 0.0
        self._steps_D = np.arange(1, max_draft_tokens + 1)
        # What the current drafting has taken, and the probability that each chain is accepted so far.
        self._spent = Spent(costs, max_draft_tokens)
        self._survival = np.zeros(0)
        # What running its prompt would add to each of a chain's rounds, in nanoseconds.
        self._prompt_ns = np.zeros(0)
        self._is_exploring = False
        # Expected accepted tokens among the next 1, 2, .. of a chain.
        self._worth = np.zeros((0, max_draft_tokens))

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

    def wants(self, rows: DraftSequences) -> np.ndarray:
        """Every sequence's block ends where it is not in the best plan, as found after one token after the
        other; the other sequences do not wait for it, so that it may be in no later plan."""
        num_rows, features = len(rows.draft_slots_R), rows.features
        lengths_R, goes_on_R = np.full(num_rows, self.max_draft_tokens), np.ones(num_rows, bool)
        if features is None:
            self._begin(rows)
            if (explored_R := self._exploration(rows)) is not None:
                return explored_R
            survival_DR = self._survival[None, rows.draft_slots_R]
        else:
            survival_DR = self._see(rows, features)
            if self._is_exploring:
                return lengths_R
        first = rows.num_drafted - len(survival_DR) + 1
        for length, survival_R in enumerate(survival_DR, first):
            if rows.most_R is not None:
                goes_on_R &= rows.most_R > length
            asked = goes_on_R.nonzero()[0]
            if not len(asked):
                break
            draft_slots_A = rows.draft_slots_R[asked]
            pays_A = self._sequences_that_pay(rows.round, draft_slots_A, survival_R[asked], length)
            lengths_R[asked[~pays_A]], goes_on_R[asked] = length, pays_A
            self._spent.count_step(rows.round, int(pays_A.sum()))
        return lengths_R

    def num_to_verify(
        self, features: DraftFeatures, lengths_R: np.ndarray, round: RoundContext
    ) -> np.ndarray:
        """[R]: how many of each sequence's ready tokens are worth the target's time.

        Args:
            features: of the ready tokens.
            round: the target's pass, without them.
        """
        num_rows, starts_C = len(lengths_R), (lengths_R.cumsum() - lengths_R).repeat(lengths_R)
        counts = np.arange(len(starts_C) + 1)
        logs = np.zeros(len(counts))
        chances_C = self._acceptance.predict(_known(features, counts[:-1] - starts_C))
        np.log(chances_C).cumsum(out=logs[1:])
        survival_C = np.exp(logs[1:] - logs[starts_C])
        pass_ns, bare_ns = self._passes_ns(round, counts)
        # So many tokens in every round take so many steps, not all those for which there was time to spare.
        drafting_ns = self._spent.first_ns + counts * (self._spent.step_ns / max(1, num_rows))
        both = (np.maximum(np.maximum(each, drafting_ns), 1.0) for each in (pass_ns, bare_ns))
        return self._best_lengths(survival_C, lengths_R, num_rows, *both)

    def num_to_draw(self, rows: DraftSequences, confidences_RB: np.ndarray) -> np.ndarray:
        self._has_blocks, round = True, rows.round
        confidences_RB = confidences_RB[:, : max(0, self._most_steps(round, rows.num_drafted))]
        chances_C = self._acceptance_at_places.predict(place_features(confidences_RB.ravel()))
        survival_RB = chances_C.reshape(confidences_RB.shape).cumprod(axis=1)
        num_rows, num_places = survival_RB.shape
        # What is cut is known, too: else the forecast would be that of confident places alone.
        num_accepted = float(survival_RB.sum())
        self._forecast.observe(num_accepted, num_rows + num_accepted - float(survival_RB[:, -1:].sum()))
        counts = np.arange(survival_RB.size + 1)
        drawing_ns = counts * (self._costs.draft_ns(num_rows, round.num_context_tokens) / num_rows)
        drawing_ns += self._costs.synchronous_ns(num_rows, round.num_context_tokens)
        drawing_ns += self._costs.message.look_up(num_rows)
        both = (drawing_ns + each for each in self._passes_ns(round, counts))
        return self._best_lengths(survival_RB.ravel(), np.full(num_rows, num_places), round.num_rows, *both)

    def _passes_ns(self, round: RoundContext, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Times of the round's pass with so many candidates more, and of one without prompts: these cost the
        same in any case, so that a rate is that of a round without them."""
        pass_ns = self._spent.target_ns(round.num_pass_tokens + counts, round)
        if round.num_pass_tokens == round.num_rows:
            return pass_ns, pass_ns
        return pass_ns, self._spent.target_ns(round.num_rows + counts, round)

    def _best_lengths(
        self,
        survival_C: np.ndarray,
        lengths_R: np.ndarray,
        num_rows: int,
        ns: np.ndarray,
        bare_ns: np.ndarray,
    ) -> np.ndarray:
        """[R]: of sequences' tokens those that add more than g times their time. ``ns``: of this round with
        0, 1, ... of the tokens; ``bare_ns``: without prompts. g is the best rate of such a round."""

        def value(expected: np.ndarray) -> np.ndarray:
            num_tokens = num_rows + expected
            self._goodput = float((num_tokens / bare_ns).max())
            return np.asarray(num_tokens - self._goodput * ns)

        return worth_verifying(survival_C, lengths_R, value)

    def observe_tokens(self, tokens: VerifiedTokens) -> None:
        """Learn from the tokens that the target has verified."""
        if not len(tokens.depths_C):
            return
        self._acceptance.observe(_known(tokens.features, tokens.depths_C), tokens.is_accepted_C)
        estimates_C = tokens.features.estimates
        if not self._has_blocks or estimates_C is None:
            self._forecast.observe(int(tokens.is_accepted_C.sum()), len(tokens.is_accepted_C))
            return
        index = np.flatnonzero(~np.isnan(estimates_C))
        self._acceptance_at_places.observe(place_features(estimates_C[index]), tokens.is_accepted_C[index])

    def note_pause(self, num_rounds: int) -> None:
        self._forecast.pause(num_rounds)

    def _begin(self, rows: DraftSequences) -> None:
        """Drafting begins; if synchronous, g is the best that a round of equal blocks of these sequences
        could reach."""
        size = int(rows.draft_slots_R.max(initial=-1)) + 1
        if size > len(self._survival):
            self._survival, self._prompt_ns = np.zeros((2, size))
            self._worth = np.zeros((size, self.max_draft_tokens))
        self._survival[rows.draft_slots_R] = rows.reach_R
        # Histories would be of confident places alone.
        forecast_R = self._forecast.of_rows(*(rows.histories_RH * (not self._has_blocks)).T)
        self._worth[rows.draft_slots_R] = (forecast_R[:, None] ** self._steps_D).cumsum(axis=1)
        if not self._spent.num_tokens:
            self.note_pause(1)
        self._spent.begin(rows.round)
        if rows.round.is_asynchronous:
            return
        num_rows, round = len(rows.draft_slots_R), rows.round
        num_tokens_D = round.num_rows + self._worth[rows.draft_slots_R].sum(axis=0)
        message_ns = self._costs.message.look_up(num_rows)
        ns_D = self._steps_D * self._costs.draft_ns(num_rows, round.num_context_tokens)
        ns_D = ns_D + self._costs.synchronous_ns(num_rows, round.num_context_tokens)
        ns_D = ns_D + self._spent.target_ns(round.num_rows + num_rows * self._steps_D, round) + message_ns
        if rows.put_off is not None:
            worth_RD = self._worth[rows.draft_slots_R]
            ns_D = ns_D + self._run_prompts(rows, worth_RD[:, (num_tokens_D / ns_D).argmax()])
        undrafted_ns = self._spent.target_ns(round.num_rows, round) + message_ns
        undrafted = round.num_rows / max(1.0, undrafted_ns)
        self._goodput = max(undrafted, float((num_tokens_D / np.maximum(1.0, ns_D)).max()))

    def _run_prompts(self, rows: DraftSequences, worth_R: np.ndarray) -> float:
        """What running the prompts that were put off adds to a round of all sequences, which get so many
        tokens more in each of their rounds. They may end early: half of the tokens that are left are counted.
        """
        assert rows.put_off is not None
        num_rounds_R = np.maximum(1.0, rows.put_off.num_left_R / 2 / (1 + worth_R))
        prompt_ns_R = self._costs.context.draft_prefill_ns * rows.put_off.num_missing_R / num_rounds_R
        self._prompt_ns[rows.draft_slots_R] = prompt_ns_R
        return float(prompt_ns_R.sum())

    def _exploration(self, rows: DraftSequences) -> np.ndarray | None:
        """[R]: lengths of blocks while the acceptance is not known; None where it is, or no prompts are put
        off."""
        self._is_exploring = rows.put_off is not None and self._forecast.num_lacking > 0
        if rows.put_off is None or not self._is_exploring:
            return None
        round, num_rows = rows.round, len(rows.slots_R)
        alone_ns = self._spent.target_ns(round.num_rows, round) + self._costs.message.look_up(num_rows)
        lengths_R = cheapest_exploration(
            rows.put_off,
            self._spent.added_ns(round, num_rows, max(0, self._most_steps(round, 0)), is_first=True),
            num_lacking=self._forecast.num_lacking,
            prefill_ns=self._costs.context.draft_prefill_ns,
            saved_ns=alone_ns - round.num_rows / self._goodput,
        )
        for depth in range(lengths_R.max()):
            self._spent.count_step(round, int((lengths_R > depth).sum()))
        return lengths_R

    def _see(self, rows: DraftSequences, features: DraftFeatures) -> np.ndarray:
        """[D, R]: the probability that each chain is accepted up to each of its last tokens, by what was
        known of it then."""
        draft_slots_R, shape = rows.draft_slots_R, features.entropies.shape
        depths_D = rows.num_drafted - shape[0] + np.arange(shape[0])
        flat = DraftFeatures(*features.stacked.reshape(3, -1))
        chances_DR = self._acceptance.predict(_known(flat, depths_D.repeat(shape[1]))).reshape(shape)
        chances_DR[0] *= self._survival[draft_slots_R]
        survival_DR: np.ndarray = chances_DR.cumprod(axis=0)
        self._survival[draft_slots_R] = survival_DR[-1]
        return survival_DR

    def _most_steps(self, round: RoundContext, num_drafted: int) -> int:
        """The number of further steps that the round has room for."""
        most_tokens, room = self.max_draft_tokens, round.most_tokens
        return (most_tokens if room is None else min(most_tokens, room)) - num_drafted

    def _sequences_that_pay(
        self, round: RoundContext, draft_slots_A: np.ndarray, survival_A: np.ndarray, num_drafted: int
    ) -> np.ndarray:
        """bool [A]: the sequences of the best plan (numbers of sequences and of further steps, as many as the
        round has room for), if it pays."""
        num_rows, num_steps = len(draft_slots_A), self._most_steps(round, num_drafted)
        if num_steps <= 0:
            return np.zeros(num_rows, bool)
        worth_AS = survival_A[:, None] * self._worth[draft_slots_A, :num_steps]
        # What is lost by running the prompts that were put off, in tokens.
        prompts_A = self._goodput * self._prompt_ns[draft_slots_A] * (not num_drafted)
        order_A = (prompts_A - worth_AS[:, 0]).argsort(kind="stable")
        value_AS = worth_AS[order_A].cumsum(axis=0) - prompts_A[order_A].cumsum()[:, None]
        value_AS -= self._goodput * self._spent.added_ns(round, num_rows, num_steps, is_first=not num_drafted)
        best_row, best_step = divmod(int(value_AS.argmax()), num_steps)
        pays_A = np.zeros(num_rows, bool)
        if value_AS[best_row, best_step] > 0:
            pays_A[order_A[: best_row + 1]] = True
        return pays_A


def _known(features: DraftFeatures, depths_C: np.ndarray | int) -> np.ndarray:
    return token_features(features.entropies, features.probabilities, features.top_probabilities, depths_C)
