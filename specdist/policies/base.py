"""The interface of a length policy: after every token it decides whether to draft another for this sequence.

A policy may stop before a draw, or after a draw while keeping the token. It may never drop a drawn token that
it has seen: that would condition the kept tokens on their values and bias the output.

A trained head's estimate of a token comes from the draft's hidden state with that token as input, so from the
pass that the next token is drawn from. A policy that needs the estimate of the last token decides after that
pass and before the draw, so that no drawn token is dropped there either; a sequence that stops has run one
pass without a draw. Of a head that reads the state that a token was drawn from, the estimate is among the
token's features.

What a policy remembers of a sequence from block to block is the sequence's *history*, a few numbers that the
draft keeps. A preempted sequence keeps its history and continues as if it had not been preempted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from specdist.policies.options import HeadKind

# R sequences, or branches of them; C tokens of several sequences, one after the other; H numbers of a
# history. Features of a token: the fields of :class:`DraftFeatures`, of which a head's estimate is the last.
NUM_FEATURES = 4


@dataclass(frozen=True)
class DraftFeatures:
    """What the draft knows of each sequence's last drawn token, and of the distribution that it came from.

    Under greedy, where that distribution is one-hot, the softmax at temperature 1 takes its place. Features
    that were not computed are NaN.

    Attributes:
        entropies_R: in nats.
        probabilities_R: of the drawn token.
        top_probabilities_R: of the likeliest token.
        estimates_R: a trained head's estimates of the token, in [0, 1]; None without a head.
    """

    entropies_R: np.ndarray
    probabilities_R: np.ndarray
    top_probabilities_R: np.ndarray
    estimates_R: np.ndarray | None = None

    @staticmethod
    def of_head(estimates_R: np.ndarray) -> DraftFeatures:
        """The head's estimates alone."""
        unknown_R = np.full(len(estimates_R), np.nan)
        return DraftFeatures(unknown_R, unknown_R, unknown_R, estimates_R)

    def stacked(self) -> np.ndarray:
        """[4, R], in the order of the attributes."""
        estimates_R = self.estimates_R
        if estimates_R is None:
            estimates_R = np.full(len(self.entropies_R), np.nan)
        return np.stack([self.entropies_R, self.probabilities_R, self.top_probabilities_R, estimates_R])

    def select(self, index: np.ndarray) -> DraftFeatures:
        """Of some of the sequences."""
        return DraftFeatures(
            self.entropies_R[index],
            self.probabilities_R[index],
            self.top_probabilities_R[index],
            None if self.estimates_R is None else self.estimates_R[index],
        )


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """The round for which is drafted.

    Attributes:
        num_rows: sequences that decode.
        num_pass_tokens: tokens of the target's pass: all of them of an asynchronous round; of a synchronous
            one, those besides the candidates, which are still to be drafted.
        num_context_tokens: mean length of the sequences.
        is_asynchronous: the draft works while the target runs its pass.
        most_tokens: of a block, where the round has no room for as many as the policy may draft.
    """

    num_rows: int
    num_pass_tokens: int
    is_asynchronous: bool
    most_tokens: int | None = None
    num_context_tokens: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DraftSequences:
    """The sequences (and their branches) for which a policy decides.

    Attributes:
        slots_R: the sequences' slots.
        draft_slots_R: an index for state of the policy along a block: the slot itself, or the number of a
            branch, which come after the slots. A new block begins with ``num_drafted`` 0.
        histories_RH: after the last resolved block, without the block that the target may still be verifying.
        num_drafted: tokens of the block so far, without one drafted ahead in the place of a next token.
        features: of the last of them; None before the first, and for a policy that does not use features.
        earlier_estimates_R: a trained head's, of the token before the last, for a policy that does not decide
            after the pass over a token; None before the second token, and without a head.
        reach_R: probability that a branch will become its sequence's candidates; 1 for a sequence itself.
        round: the round for which is drafted.
    """

    slots_R: np.ndarray
    draft_slots_R: np.ndarray
    histories_RH: np.ndarray
    num_drafted: int
    features: DraftFeatures | None
    reach_R: np.ndarray
    round: RoundContext
    earlier_estimates_R: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class VerifiedBlocks:
    """Verified blocks of at least one candidate, with the numbers of drafted and accepted ones."""

    histories_RH: np.ndarray
    num_drafted_R: np.ndarray
    num_accepted_R: np.ndarray


@dataclass(frozen=True, kw_only=True)
class VerifiedTokens:
    """Every sequence's verified tokens, up to the first rejected one: features, depth in the block (from 0),
    and whether each was accepted."""

    features: DraftFeatures
    depths_C: np.ndarray
    is_accepted_C: np.ndarray


class LengthPolicy(Protocol):
    """Pure arithmetic: no tensors, no clock, no knowledge of the batch's other sequences."""

    @property
    def initial_history(self) -> tuple[float, ...]:
        """The history [H] of a new sequence."""
        ...

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        """[R, H]: the histories after these blocks."""
        ...

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens of one block; pages for them are reserved beforehand."""
        ...

    @property
    def uses_features(self) -> bool:
        """Whether it needs the features; on a GPU it is then asked after several steps."""
        ...

    def wants_more(self, rows: DraftSequences) -> np.ndarray:
        """bool [R]: draft another token?"""
        ...


@runtime_checkable
class BatchPolicy(LengthPolicy, Protocol):
    """A policy that decides for the whole batch, and learns from all of it. It must use features."""

    @property
    def reads_head(self) -> bool:
        """Whether it also needs a head's estimates, of all tokens that a pass was run over."""
        ...

    def num_to_verify(
        self, features: DraftFeatures, lengths_R: np.ndarray, round: RoundContext
    ) -> np.ndarray:
        """[R]: how many of each sequence's tokens drafted ahead go into the target's next pass.

        The others are kept and verified later. ``features``: of all these tokens, sequence after
        sequence. ``round``: its pass, without these tokens.
        """
        ...

    def observe_tokens(self, tokens: VerifiedTokens) -> None:
        """Learn from verified tokens."""
        ...


@runtime_checkable
class RunPolicy(BatchPolicy, Protocol):
    """A policy that can be asked after many steps at once."""

    def num_unanimous(self, rows: DraftSequences, features: DraftFeatures) -> int:
        """After how many steps, from the first on, all sequences go on: what :meth:`wants_more` would have
        answered after each of these, and with the same effects on what it remembers. It may say fewer. After
        the next one it is to be asked by itself.

        Args:
            rows: as they are after the first step, without features.
            features: of the tokens of all steps, one step after the other.
        """
        ...


@runtime_checkable
class BlockPolicy(BatchPolicy, Protocol):
    """A policy that chooses the lengths of blocks of which all distributions are known before anything is
    drawn."""

    def num_to_draw(self, rows: DraftSequences, confidences_RB: np.ndarray) -> np.ndarray:
        """[R]: how many tokens of each block to draw, all of which are verified.

        Args:
            rows: those for which :meth:`wants_more` has said that a pass over their blocks pays.
            confidences_RB: of every place, in [0, 1]: what is known of its token before any is drawn, the
                probability of the likeliest one, or a trained head's estimate. They come back as estimates of
                verified tokens.
        """
        ...


@runtime_checkable
class PausingPolicy(BatchPolicy, Protocol):
    """A policy that drafts nothing for any sequence where nothing pays, and need not be asked for some rounds
    then."""

    def note_pause(self, num_rounds: int) -> None:
        """Rounds have passed in which nothing was drafted."""
        ...


@runtime_checkable
class HeadPolicy(LengthPolicy, Protocol):
    """A policy that gets a trained head's estimates of the tokens of the block.

    With ``needs_last_estimate`` it decides when the estimate of the last token is known, and finds it among
    the features; before the first token it decides without. Else it decides as others do, and gets the
    estimate of the token before the last.
    """

    @property
    def needs_last_estimate(self) -> bool: ...

    @property
    def head_kind(self) -> HeadKind:
        """What the head must estimate: the probability of acceptance, or whether a token is acceptable."""
        ...


def needs_last_estimate(policy: LengthPolicy) -> bool:
    """Whether it needs a head's estimate of the last token."""
    return isinstance(policy, HeadPolicy) and policy.needs_last_estimate


def reads_head(policy: LengthPolicy) -> bool:
    """Whether the policy needs a draft with a trained head."""
    return isinstance(policy, HeadPolicy) or (isinstance(policy, BatchPolicy) and policy.reads_head)


class WithoutHistory:
    """Mix-in for a policy without histories."""

    @property
    def initial_history(self) -> tuple[float, ...]:
        return ()

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        return blocks.histories_RH
