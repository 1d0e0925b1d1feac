"""What a round with a draft on a rank of its own should do: decode alone, take turns, or draft ahead.

``--overlap auto``. Three rates are compared for the sequences that run now, in tokens per nanosecond, each
with its best number of draft tokens; a is the probability that the first token of a block is accepted, b that
of a token after an accepted one, which is higher where texts have easy and hard stretches; T and D are the
times of a target pass and of a draft step, M that of asking the draft, H that of the draft's host beside its
steps, all of them measured before the run:

    alone    R / T(R)
    in turns R (1 + a + a b + ... + a b^(K - 1)) / (K D(R) + H + T(R (K + 1)) + M)
    ahead    R (tokens of a pass with K candidates ready) / (max(T, D(R) + K D(R (1 + branches)) + H) + M)

The times are those of this many sequences after contexts of this length, so the choice follows the batch as
it grows and drains. The acceptance, and what branches catch, are learned from what the target verifies. Which
tokens of a block are worth their time is for the length policy to say.

Where nothing beats decoding alone, the draft is not asked at all for a number of rounds. Then it *listens*:
it draws one token for every sequence while the target runs its pass, and the next round verifies it. That
costs two messages and no target time, so the pauses are as long as keeps these messages below
:data:`LISTENING_SHARE` of the time.

Pure arithmetic on frozen costs: no clock. R sequences, K candidates, B numbers of branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specdist.policies.costs import BRANCH_COUNTS, CostModel
from specdist.policies.formulas import caught_share

# Acceptance assumed before any token was verified, and its weight in tokens; half-life of what is learned.
PRIOR_ACCEPTANCE = 0.7
PRIOR_TOKENS = 16
MEMORY = 128
# Decoding alone is left for a gain of this factor, and another way of drafting for this one.
WORTH_ASKING = 1.02
WORTH_CHANGING = 1.01
# Tokens to be verified before the target goes on alone, fewest rounds alone, and the share of the time that
# listening may take.
NUM_HEARD = 16
FEWEST_ROUNDS_ALONE = 16
LISTENING_SHARE = 0.005
MAX_CACHED = 1024


@dataclass(frozen=True, kw_only=True)
class RoundShape:
    """What the draft does in a round.

    Attributes:
        drafts_now: before its reply, as many candidates as the length policy wants.
        num_ahead: tokens after those, while the target runs its pass; 0 waits.
        num_branches: per sequence, while drafting ahead.
        num_rounds_alone: rounds after this one in which the target does not ask.
    """

    drafts_now: bool = False
    num_ahead: int = 0
    num_branches: int = 0
    num_rounds_alone: int = 0


ALONE = RoundShape()
LISTEN = RoundShape(num_ahead=1)
IN_TURNS = RoundShape(drafts_now=True)


class _Learned(NamedTuple):
    """Acceptance of a block's first token and of one after an accepted token, misses caught over what was
    assumed, and tokens of prompts per new token."""

    first: float
    later: float
    catching: float = 1.0
    prompts: float = 0.0


@dataclass(frozen=True)
class _Rates:
    """Of decoding alone, in turns, and [K, B] ahead."""

    alone: float
    in_turns: float
    ahead_KB: np.ndarray


class RoundChooser:
    """Chooses the shape of every round; lives where the draft is, which knows what was accepted."""

    def __init__(
        self,
        costs: CostModel,
        *,
        max_draft_tokens: int,
        fixed_length: int | None = None,
        branch_counts: Sequence[int] = BRANCH_COUNTS,
    ) -> None:
        """``fixed_length``: of every block that is drafted in turns, where the length policy does not decide.
        Ahead a block may be shorter all the same, as in :meth:`always_ahead`."""
        self._costs = costs
        self._lengths_K = np.arange(1, max_draft_tokens + 1)
        self._is_in_turns_K = (self._lengths_K == fixed_length) | (fixed_length is None)
        self._counts_B = np.array(branch_counts)
        self._caught_B = np.array([caught_share(count) for count in branch_counts])
        # Decaying sums: tokens accepted and verified, and those of them after an accepted one; misses caught
        # and expected to be; prompt and new tokens.
        self._acceptance = np.array([PRIOR_ACCEPTANCE, 1.0]) * PRIOR_TOKENS
        self._later = np.zeros(2)
        self._catching = np.array([1.0, 1.0]) * PRIOR_TOKENS
        self._prompts = np.array([0.0, 1.0])
        self._chunk_tokens = 1.0
        self._num_heard = 0
        self._last = LISTEN
        self._cached: dict[tuple[float, ...], _Rates] = {}

    @property
    def acceptance(self) -> float:
        """The estimate of the probability that a drafted token is accepted."""
        return float(self._acceptance[0] / self._acceptance[1])

    def observe(self, num_accepted_R: np.ndarray, is_rejected_R: np.ndarray) -> None:
        """The target has verified blocks: accepted tokens of each, and whether another one was rejected."""
        num_accepted, num_rejected = int(num_accepted_R.sum()), int(is_rejected_R.sum())
        num_later_accepted = int(np.maximum(num_accepted_R - 1, 0).sum())
        num_later_rejected = int(is_rejected_R[num_accepted_R > 0].sum())
        num_verified = num_accepted + num_rejected
        self._num_heard += num_verified
        kept = 0.5 ** (num_verified / MEMORY)
        self._acceptance = kept * self._acceptance + (num_accepted, num_verified)
        self._later = kept * self._later + (num_later_accepted, num_later_accepted + num_later_rejected)

    def observe_misses(self, num_branches: int, num_misses: int, num_caught: int) -> None:
        """So many sequences with branches had another next token than what was drafted, and found so many of
        these among their branches."""
        if not num_branches or not num_misses:
            return
        self._catching *= 0.5 ** (num_misses / MEMORY)
        self._catching += num_caught, num_misses * caught_share(num_branches)

    def observe_pass(self, num_prompt_tokens: int, num_new_tokens: int) -> None:
        """A target pass has so many tokens of prompts, and the round has committed so many tokens. Prompts of
        a pass without sequences that decode, such as a run's first ones, stand beside none."""
        if not num_new_tokens:
            return
        self._prompts *= 0.5 ** (num_new_tokens / (16 * MEMORY))
        self._prompts += num_prompt_tokens, num_new_tokens
        if num_prompt_tokens:
            self._chunk_tokens += 0.1 * (num_prompt_tokens - self._chunk_tokens)

    def choose(self, num_rows: int, num_context_tokens: float) -> None:
        """Decide what rounds do from now on, with so many sequences that decode, and contexts of this mean
        length."""
        rates = self._rates(num_rows, num_context_tokens)
        best, rate = self._best(rates)
        last = self._rate_of(self._last, rates)
        if self._last in (ALONE, LISTEN):
            if rate > WORTH_ASKING * rates.alone:
                self._last = best
        elif max(rate, last) <= rates.alone:
            self._last = LISTEN
        elif rate > WORTH_CHANGING * last:
            self._last = best

    def always_ahead(self, num_rows: int, *, acceptance: float) -> RoundShape:
        """Of rounds that are all the same, and ahead. Nothing is learned of the acceptance; contexts are
        those at which costs were measured."""
        rates = self._work_out(num_rows, self._costs.context.num_tokens, _Learned(acceptance, acceptance))
        if rates.ahead_KB.max() <= rates.alone:
            return RoundShape(num_ahead=1, num_branches=int(self._counts_B[0]))
        return self._best_ahead(rates)

    def shape(self, num_rows: int, num_context_tokens: float, *, is_pending: bool) -> RoundShape:
        """Of the round that begins; ``is_pending``: tokens are drafted already that the target has still to
        verify."""
        if self._last is not LISTEN:
            return self._last
        if is_pending:
            return ALONE
        if self._num_heard < NUM_HEARD:
            return LISTEN
        self._num_heard = 0
        return RoundShape(num_rounds_alone=self._num_rounds_alone(num_rows, num_context_tokens))

    def shape_ahead(self, shape: RoundShape, *, is_pending: bool) -> RoundShape:
        """Of the rest of a round that has begun with this shape, once the target has its reply."""
        if shape.num_rounds_alone:
            return shape
        return ALONE if self._last is LISTEN and is_pending else self._last

    def _best(self, rates: _Rates) -> tuple[RoundShape, float]:
        ahead = float(rates.ahead_KB.max())
        return (IN_TURNS, rates.in_turns) if rates.in_turns >= ahead else (self._best_ahead(rates), ahead)

    def _best_ahead(self, rates: _Rates) -> RoundShape:
        length, count = np.unravel_index(int(rates.ahead_KB.argmax()), rates.ahead_KB.shape)
        return RoundShape(num_ahead=int(self._lengths_K[length]) + 1, num_branches=int(self._counts_B[count]))

    def _rate_of(self, shape: RoundShape, rates: _Rates) -> float:
        if shape.drafts_now:
            return rates.in_turns
        if shape.num_ahead < 2:
            return rates.alone
        length = int(np.searchsorted(self._lengths_K, shape.num_ahead - 1))
        count = int(np.searchsorted(self._counts_B, shape.num_branches))
        return float(rates.ahead_KB[length, count])

    def _num_rounds_alone(self, num_rows: int, num_context_tokens: float) -> int:
        num_listening = 1 - NUM_HEARD // -num_rows
        pass_ns = float(self._costs.target_ns(num_rows, num_rows, num_context_tokens))
        message_ns = num_listening * float(self._costs.message.look_up(num_rows))
        return max(FEWEST_ROUNDS_ALONE, int(message_ns / (LISTENING_SHARE * max(1.0, pass_ns))) + 1)

    def _learned(self) -> _Learned:
        """Rounded, so that most rounds find their rates worked out."""
        # What is known of both kinds of tokens together counts for both where little is known of each.
        prior = PRIOR_TOKENS * np.array([self.acceptance, 1.0])
        (first, num_first), (later, num_later) = self._acceptance - self._later + prior, self._later + prior
        return _Learned(
            round(float(first / num_first), 2),
            round(float(later / num_later), 2),
            round(min(1.0, float(self._catching[0] / self._catching[1])), 1),
            round(float(self._prompts[0] / self._prompts[1]), 1),
        )

    def _rates(self, num_rows: int, num_context_tokens: float) -> _Rates:
        learned, context = self._learned(), round(float(np.log2(1 + num_context_tokens)), 1)
        key = (num_rows, context, *learned)
        if key not in self._cached:
            if len(self._cached) >= MAX_CACHED:
                self._cached.clear()
            self._cached[key] = self._work_out(num_rows, num_context_tokens, learned)
        return self._cached[key]

    def _work_out(self, num_rows: int, num_context_tokens: float, learned: _Learned) -> _Rates:
        first, later, catching, prompts = learned
        costs, lengths_K, context = self._costs, self._lengths_K, num_context_tokens
        message_ns = float(costs.message.look_up(num_rows))

        def mean_ns(sizes: np.ndarray, new: np.ndarray, round_ns: Callable[[np.ndarray], Any]) -> np.ndarray:
            """Of rounds with passes of these sizes and so many new tokens per sequence; ``round_ns`` of a
            pass's time. Prompts stand beside the sequences in a part of the passes."""
            prompts_of_round = prompts * num_rows * new
            chunks = np.maximum(int(self._chunk_tokens), prompts_of_round)
            longer_ns = costs.target_ns(np.rint(sizes + chunks).astype(int), num_rows, context)
            share = prompts_of_round / chunks
            pass_ns = costs.target_ns(sizes, num_rows, context)
            return np.asarray(share * round_ns(longer_ns) + (1 - share) * round_ns(pass_ns))

        alone_ns = float(mean_ns(np.array(num_rows), np.array(1.0), lambda pass_ns: pass_ns))
        full_K = first * later ** (lengths_K - 1)
        in_block_K = 1 + np.cumsum(full_K)

        # After a block that was accepted whole the draft runs its last token too.
        first_ns_K = costs.draft_ns(np.rint(num_rows * (1 + full_K)).astype(int), context)
        step_ns = float(costs.draft_ns(num_rows, context))
        now_ns_K = first_ns_K + (lengths_K - 1) * step_ns + float(costs.turns.look_up(num_rows))
        in_turns_ns_K = mean_ns(
            num_rows * (lengths_K + 1), in_block_K, lambda pass_ns_K: now_ns_K + pass_ns_K
        )
        in_turns_K = num_rows * in_block_K / (in_turns_ns_K + message_ns)

        caught_B = catching * self._caught_B
        hit_K = (later * full_K)[:, None]
        stays_KB = hit_K + (1 - hit_K) * caught_B
        comes_B = first + (1 - first) * caught_B
        ready_KB = comes_B / (1 - stays_KB + comes_B)
        tokens_KB = 1 + ready_KB * (in_block_K[:, None] - 1)

        wide_ns_B = costs.draft_ns(num_rows * (1 + self._counts_B), context)
        drafting_ns_KB = step_ns + lengths_K[:, None] * wide_ns_B + float(costs.ahead.look_up(num_rows))
        # Only a pass with a prompt beside the sequences leaves the draft more time.
        ahead_ns_KB = mean_ns(
            np.rint(num_rows * (1 + ready_KB * lengths_K[:, None])).astype(int),
            tokens_KB,
            lambda pass_ns_KB: np.maximum(pass_ns_KB, drafting_ns_KB),
        )
        return _Rates(
            alone=num_rows / max(1.0, alone_ns),
            in_turns=float(in_turns_K[self._is_in_turns_K].max()),
            ahead_KB=num_rows * tokens_KB / np.maximum(1.0, ahead_ns_KB + message_ns),
        )
