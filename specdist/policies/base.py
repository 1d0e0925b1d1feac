"""The interface of a length policy: how long a sequence's block is, by what is known of its tokens so far.

A policy may end a block before a draw, or after a token that it keeps. It may never drop a drawn token that
it has seen: that would condition the kept tokens on their values and bias the output.

It is asked for the lengths of blocks before the first token; and, if it uses what drawn tokens show, after
every run of draft steps, for all tokens that the run has drawn. A length may depend on the tokens before it
alone: what a run has drawn beyond it is dropped unseen. So however many steps a run has, the blocks are those
of single steps.

A trained head's estimate of a token comes from the draft's hidden state with that token as input, so from the
pass that the next token is drawn from. A policy that needs the estimate of the last token ends a block after
that pass and before the draw, so that no drawn token is dropped there either; a sequence that stops has run
one pass without a draw. Of a head that reads the state that a token was drawn from, the estimate is among the
token's features.

What a policy remembers of a sequence from block to block is the sequence's *history*, a few numbers that the
draft keeps. A preempted sequence keeps its history and continues as if it had not been preempted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

HeadKind = Literal["acceptance", "verifier"]
# R sequences, or branches of them; D tokens of each, one after the other; C tokens of several sequences, one
# after the other; H numbers of a history. Features of a token: the fields of :class:`DraftFeatures`, of which
# a head's estimate is the last.
NUM_FEATURES = 4


@dataclass(frozen=True)
class DraftFeatures:
    """What the draft knows of drawn tokens, and of the distributions that they came from: arrays [C] or
    [D, R].

    Under greedy, where a distribution is one-hot, the softmax at temperature 1 takes its place. Features that
    were not computed are NaN.

    Attributes:
        entropies: in nats.
        probabilities: of the drawn token.
        top_probabilities: of the likeliest token.
        estimates: a trained head's estimates of the token, in [0, 1]; None without a head.
    """

    entropies: np.ndarray
    probabilities: np.ndarray
    top_probabilities: np.ndarray
    estimates: np.ndarray | None = None

    @staticmethod
    def unknown(*shape: int) -> DraftFeatures:
        """Features of which none is known."""
        nothing = np.full(shape, np.nan)
        return DraftFeatures(nothing, nothing, nothing)

    @property
    def stacked(self) -> np.ndarray:
        """[3, ...]: all but the estimates, in the order of the attributes."""
        return np.stack([self.entropies, self.probabilities, self.top_probabilities])


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


class PutOff(NamedTuple):
    """Sequences of a draft that runs a prompt only when it drafts after it.

    Attributes:
        num_missing_R: tokens that it has to run before it drafts.
        num_left_R: most tokens that the sequence may still get.
    """

    num_missing_R: np.ndarray
    num_left_R: np.ndarray


@dataclass(frozen=True, kw_only=True)
class DraftSequences:
    """The sequences (and their branches) for which a policy decides.

    Attributes:
        slots_R: the sequences' slots.
        draft_slots_R: an index for state of the policy along a block: the slot itself, or the number of a
            branch, which come after the slots. A new block begins with ``num_drafted`` 0.
        histories_RH: after the last resolved block, without the block that the target may still be verifying.
        num_drafted: tokens of the block so far, without one drafted ahead in the place of a next token.
        features: [D, R], of the last D of them, which are those since the last question; None before the
            first, and for a policy that does not use features.
        earlier_estimates_DR: a trained head's, of the token before each of these, NaN where that is not of
            the block. Only for a policy that does not need the estimate of the last token; None without a
            head.
        most_R: most tokens of each block, which ends earlier than the others' with a stop token, or where a
            sequence has no room for more; None: no limit is known. Features beyond it are NaN.
        reach_R: probability that a branch will become its sequence's candidates; 1 for a sequence itself.
        put_off: what the draft has put off of them; None: it runs every prompt at once.
        round: the round for which is drafted.
    """

    slots_R: np.ndarray
    draft_slots_R: np.ndarray
    histories_RH: np.ndarray
    num_drafted: int
    features: DraftFeatures | None
    reach_R: np.ndarray
    round: RoundContext
    earlier_estimates_DR: np.ndarray | None = None
    most_R: np.ndarray | None = None
    put_off: PutOff | None = None

    def up_to_first(self, goes_on_DR: np.ndarray, most: int) -> np.ndarray:
        """[R]: lengths of blocks that end after the first of the last D tokens that is not to go on, and
        otherwise with ``most`` tokens."""
        first_R = self.num_drafted - len(goes_on_DR) + 1 + goes_on_DR.argmin(axis=0)
        return np.where(goes_on_DR.all(axis=0), most, np.minimum(first_R, most))


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


class LengthPolicy:
    """Pure arithmetic: no tensors, no clock. A policy decides for each sequence alone, unless it is one for
    the batch.

    Attributes:
        uses_features: whether lengths depend on features of drawn tokens.
        reads_head: whether it needs a trained head's estimates, of the kind ``head_kind``: of the probability
            of acceptance, or of whether a token is acceptable.
        needs_last_estimate: whether a block ends by the estimate of its last token. Such a policy gets no
            other features, unless the head gives its estimate with the draw.
        is_for_batch: whether it decides for the whole batch, must know which sequences have ended, and learns
            from all verified tokens. It must use features. Where it drafts nothing for any sequence, it need
            not be asked for some rounds.
    """

    uses_features: bool = False
    reads_head: bool = False
    head_kind: HeadKind | None = None
    needs_last_estimate: bool = False
    is_for_batch: bool = False

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens of one block; pages for them are reserved beforehand."""
        raise NotImplementedError

    @property
    def looks_at_tokens(self) -> bool:
        """Whether lengths depend on drawn tokens; on a GPU it is then asked after several steps."""
        return self.uses_features or self.reads_head

    @property
    def initial_history(self) -> tuple[float, ...]:
        """The history [H] of a new sequence."""
        return ()

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        """[R, H]: the histories after these blocks."""
        return blocks.histories_RH

    def wants(self, rows: DraftSequences) -> np.ndarray:
        """int [R]: most tokens of each block, by what is known so far. A block that has more already ends
        there, and the tokens after it count as never drawn; one that has as many ends."""
        raise NotImplementedError

    def num_to_draw(self, rows: DraftSequences, confidences_RB: np.ndarray) -> np.ndarray:
        """[R]: how many tokens of each block of a block drafter to draw, all of which are verified. For a
        policy for the batch.

        Args:
            rows: those for which :meth:`wants` has said that a pass over their blocks pays.
            confidences_RB: of every place, in [0, 1]: what is known of its token before any is drawn, the
                probability of the likeliest one, or a trained head's estimate. They come back as estimates of
                verified tokens.
        """
        return np.full(len(rows.slots_R), confidences_RB.shape[1])

    def num_to_verify(
        self, features: DraftFeatures, lengths_R: np.ndarray, round: RoundContext
    ) -> np.ndarray:
        """[R]: how many of each sequence's tokens drafted ahead go into the target's next pass. For a policy
        for the batch.

        The others are kept and verified later. ``features``: of all these tokens, sequence after
        sequence. ``round``: its pass, without these tokens.
        """
        return lengths_R

    def observe_tokens(self, tokens: VerifiedTokens) -> None:
        """Learn from verified tokens. For a policy for the batch."""

    def note_pause(self, num_rounds: int) -> None:
        """Rounds have passed in which nothing was drafted. For a policy for the batch."""
