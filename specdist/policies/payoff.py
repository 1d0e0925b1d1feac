"""What drafting brings now: rates of the kinds of rounds by load and acceptance, and what follows from them.

A round's kind is its :class:`RoundShape`: the target alone, or with synchronous or asynchronous drafting.
Three rates are compared for the sequences that run now, in tokens per nanosecond, each with its best number
of draft tokens; a is the probability that the first token of a block is accepted, b that of a token after an
accepted one, which is higher where texts have easy and hard stretches; T and D are the times of a target pass
and of a draft step, measured before the run, M that of asking the draft, H that of the draft's host beside
its steps:

    alone         R / T(R)
    synchronous   R (1 + a + a b + ... + a b^(K - 1)) / (K D(R) + H + T(R (K + 1)) + M)
    asynchronous  R (tokens of a pass with K ready) / (max(T, D(R) + K D(R (1 + branches)) + H) + M)

The times are those of this many sequences after contexts of this length, so the choice follows the batch as
it grows and drains. The acceptance, and what branches catch, are learned from what the target verifies. Which
tokens of a block are worth their time is for the length policy to say, by :func:`worth_verifying`.

- ``--overlap auto``: :class:`RoundChooser` takes the shape with the best rate. Where nothing beats decoding
  alone, the draft is not asked at all for a number of rounds. Then it *listens*: it draws one token for every
  sequence while the target runs its pass, and the next round verifies it. That costs two messages and no
  target time, so the pauses are as long as keeps these messages below :data:`LISTENING_SHARE` of the time.
- ``--overlap asynchronous``: one shape for all rounds, that with the best rate at the start.
- A draft in the target's process, which can only take turns: its policy decides, and
  :class:`specdist.engine.draft.lazy_prefill.Pauses` says for how long such a decision holds.

Pure arithmetic on frozen costs: no clock. R sequences, K candidates, B numbers of branches, S shapes of a
round, C tokens of several sequences, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specdist.policies.costs import BRANCH_COUNTS, CostModel
from specdist.policies.formulas import RoundWork, asynchronous_round, caught_share, synchronous_round

# The prior of a chooser: acceptance assumed before any token was verified, and its weight in tokens;
# half-life of what is learned.
PRIOR_ACCEPTANCE, PRIOR_TOKENS, MEMORY = 0.7, 16, 128
# The acceptance of a pair where it is not learned: in work ahead that is the same in all rounds.
ASSUMED_ACCEPTANCE = 0.8
# Decoding alone is left for a gain of this factor, and another way of drafting for this one.
WORTH_ASKING, WORTH_CHANGING = 1.02, 1.01
# Tokens to be verified before the target goes on alone, fewest rounds alone, and the share of the time that
# listening may take.
NUM_HEARD, FEWEST_ROUNDS_ALONE, LISTENING_SHARE = 16, 16, 0.005
# The least share of the sequences that a decision against drafting in the target's process was about: with
# fewer it may be another.
LEAST_SHARE = 0.75
MAX_CACHED = 1024


@dataclass(frozen=True, kw_only=True)
class RoundShape:
    """What the draft does in a round; of all rounds together, the most that it may do in one.

    Attributes:
        drafts_now: before its reply, as many candidates as the length policy wants.
        num_ahead: tokens after those, while the target runs its pass, of which the first stands in the place
            of the next token; 0 waits.
        num_branches: per sequence, while drafting ahead.
        num_rounds_alone: rounds after this one in which the target does not ask.
    """

    drafts_now: bool = False
    num_ahead: int = 0
    num_branches: int = 0
    num_rounds_alone: int = 0


ALONE = RoundShape()
LISTEN = RoundShape(num_ahead=1)
SYNCHRONOUS = RoundShape(drafts_now=True)


class Learned(NamedTuple):
    """Acceptance of a block's first token and of one after an accepted token, misses caught over what was
    assumed, and tokens of prompts per new token."""

    first: float
    later: float
    catching: float = 1.0
    prompts: float = 0.0


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
        """``fixed_length``: of every synchronous block, where the length policy does not decide. An
        asynchronous block may be shorter all the same."""
        self._costs = costs
        self._lengths_K = np.arange(1, max_draft_tokens + 1)
        self._is_synchronous_K = (self._lengths_K == fixed_length) | (fixed_length is None)
        self._counts_B = np.array(branch_counts)
        self._caught_B = np.array([caught_share(count) for count in branch_counts])
        self.shapes = (ALONE, SYNCHRONOUS, *(
            RoundShape(num_ahead=length + 1, num_branches=count)
            for length in range(1, max_draft_tokens + 1) for count in branch_counts
        ))  # fmt: skip
        # Listening takes no more time than decoding alone.
        self._places = {LISTEN: 0, **{shape: place for place, shape in enumerate(self.shapes)}}
        # Decaying sums: tokens accepted and verified, and those of them after an accepted one; misses caught
        # and expected to be; prompt and new tokens.
        self._acceptance = np.array([PRIOR_ACCEPTANCE, 1.0]) * PRIOR_TOKENS
        self._later = np.zeros(2)
        self._catching = np.array([1.0, 1.0]) * PRIOR_TOKENS
        self._prompts = np.array([0.0, 1.0])
        self._chunk_tokens = 1.0
        self._num_heard = 0
        self._last = LISTEN
        self._cached: dict[tuple[float, ...], np.ndarray] = {}

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
        """Observe how many sequences with branches had another next token than what was drafted, and how many
        found it among their branches."""
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
        rates_S = self.rates(num_rows, num_context_tokens)
        best = 1 + int(rates_S[1:].argmax())
        alone, rate, last = rates_S[[0, best, self._places[self._last]]].tolist()
        if self._last is LISTEN:
            if rate > WORTH_ASKING * alone:
                self._last = self.shapes[best]
        elif max(rate, last) <= alone:
            self._last = LISTEN
        elif rate > WORTH_CHANGING * last:
            self._last = self.shapes[best]

    def shape(self, num_rows: int, num_context_tokens: float, *, is_pending: bool) -> RoundShape:
        """The shape of the round that begins; ``is_pending``: tokens are drafted already that the target has
        still to verify."""
        if self._last is not LISTEN:
            return self._last
        if is_pending:
            return ALONE
        if self._num_heard < NUM_HEARD:
            return LISTEN
        self._num_heard = 0
        return RoundShape(num_rounds_alone=self._num_rounds_alone(num_rows, num_context_tokens))

    def shape_ahead(self, shape: RoundShape, *, is_pending: bool) -> RoundShape:
        """The shape of the rest of a round that has begun with this one, once the target has its reply."""
        if shape.num_rounds_alone:
            return shape
        return ALONE if self._last is LISTEN and is_pending else self._last

    def _num_rounds_alone(self, num_rows: int, num_context_tokens: float) -> int:
        num_listening = 1 - NUM_HEARD // -num_rows
        pass_ns = self._costs.target_ns(num_rows, num_rows, num_context_tokens)
        message_ns = num_listening * self._costs.message.look_up(num_rows)
        return max(FEWEST_ROUNDS_ALONE, int(message_ns / (LISTENING_SHARE * max(1.0, pass_ns))) + 1)

    def rates(self, num_rows: int, num_context_tokens: float) -> np.ndarray:
        """[S]: tokens per nanosecond of rounds of each of ``shapes``, by what was learned so far; rounded, so
        that most rounds find their rates worked out."""
        # What is known of both kinds of tokens together counts for both where little is known of each.
        prior = PRIOR_TOKENS * np.array([self.acceptance, 1.0])
        (first, num_first), (later, num_later) = self._acceptance - self._later + prior, self._later + prior
        learned = Learned(
            round(float(first / num_first), 2),
            round(float(later / num_later), 2),
            round(min(1.0, float(self._catching[0] / self._catching[1])), 1),
            round(float(self._prompts[0] / self._prompts[1]), 1),
        )
        key = (num_rows, round(float(np.log2(1 + num_context_tokens)), 1), *learned)
        if key not in self._cached:
            if len(self._cached) >= MAX_CACHED:
                self._cached.clear()
            self._cached[key] = self.rates_of(num_rows, num_context_tokens, learned)
        return self._cached[key]

    def rates_of(self, num_rows: int, num_context_tokens: float, learned: Learned) -> np.ndarray:
        """[S]: the same, by what is given."""
        first, later, catching, prompts = learned
        costs, lengths_K, context = self._costs, self._lengths_K, num_context_tokens
        message_ns = costs.message.look_up(num_rows)

        def mean_ns(sizes: np.ndarray, new: np.ndarray, round_ns: Callable[[np.ndarray], Any]) -> np.ndarray:
            """The mean time of rounds with passes of these sizes and so many new tokens per sequence;
            ``round_ns``: of a pass's time. Prompts stand beside the sequences in a part of the passes."""
            prompts_of_round = prompts * num_rows * new
            chunks = np.maximum(int(self._chunk_tokens), prompts_of_round)
            longer_ns = costs.target_ns(np.rint(sizes + chunks).astype(int), num_rows, context)
            share = prompts_of_round / chunks
            pass_ns = costs.target_ns(sizes, num_rows, context)
            return np.asarray(share * round_ns(longer_ns) + (1 - share) * round_ns(pass_ns))

        alone_ns = float(mean_ns(np.array(num_rows), np.array(1.0), lambda pass_ns: pass_ns))
        blocks = synchronous_round(first, lengths_K, later=later)
        blocks_ns_K = self._drafting_ns(blocks, num_rows, context) + costs.synchronous_ns(num_rows, context)
        synchronous_ns_K = mean_ns(
            num_rows * blocks.num_verified, blocks.num_tokens, lambda pass_ns_K: blocks_ns_K + pass_ns_K
        )
        synchronous_K = num_rows * blocks.num_tokens / (synchronous_ns_K + message_ns)

        ahead = asynchronous_round(
            first, lengths_K[:, None], catching * self._caught_B, self._counts_B, later=later
        )
        drafting_ns_KB = self._drafting_ns(ahead, num_rows, context) + costs.asynchronous.look_up(num_rows)
        # Only a pass with a prompt beside the sequences leaves the draft more time.
        ahead_ns_KB = mean_ns(
            np.rint(num_rows * ahead.num_verified).astype(int),
            ahead.num_tokens,
            lambda pass_ns_KB: np.maximum(pass_ns_KB, drafting_ns_KB),
        )
        ahead_KB = num_rows * ahead.num_tokens / np.maximum(1.0, ahead_ns_KB + message_ns)
        synchronous = synchronous_K[self._is_synchronous_K].max()
        return np.concatenate([[num_rows / max(1.0, alone_ns), synchronous], ahead_KB.ravel()])

    def _drafting_ns(self, work: RoundWork, num_rows: int, num_context_tokens: float) -> Any:
        """The draft's steps of a round."""
        first_ns, later_ns = (
            self._costs.draft_ns(np.rint(num_rows * np.asarray(size)).astype(int), num_context_tokens)
            for size in (work.num_first, work.num_later)
        )
        return first_ns + work.num_steps * later_ns


def worth_verifying(
    chances_C: np.ndarray, lengths_R: np.ndarray, value: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """[R]: how many tokens of each sequence's chain are worth the target's time.

    Args:
        chances_C: that a token and all before it in its chain of ``lengths_R`` are right.
        value: of verifying the best 0, 1, ... tokens of the batch, from the number of them that is expected
            to be right.
    """
    # Chances fall along a chain, so the best tokens of the batch are the first ones of each chain.
    order_C = (-chances_C).argsort(kind="stable")
    expected = np.zeros(len(order_C) + 1)
    chances_C[order_C].cumsum(out=expected[1:])
    best = int(value(expected).argmax())
    lines_C = np.arange(len(lengths_R)).repeat(lengths_R)
    return np.bincount(lines_C[order_C[:best]], minlength=len(lengths_R))
