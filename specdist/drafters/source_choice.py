"""Memory or the draft model: which promises a sequence more tokens in this round, and how far memory goes.

The *worth* of a block is the expected number of its tokens that are accepted, less what verifying it costs.
Of memory that is the sum of the chances that its index has learned; of the model, the mean of what its
blocks brought: the sequence's own, beside those of all sequences after a match of the same length, since
what is easy for memory is often easy for the model too. Everything is known before the model draws a token.

What a verified token costs is told by the measured times of passes: the tokens that the run could have
committed in the time that it adds. Without measured times every token is verified whose chance is not below a
fixed one.

No clock, no tensors. R sequences, C tokens of several of them, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdist.drafters.ngram_index import Proposals
from specdist.drafters.ngram_state import CLASS_STARTS, MAX_MATCH
from specdist.drafters.text_store import NO_TEXTS, TextSettings
from specdist.policies import VerifiedBlocks
from specdist.policies.costs import CostModel
from specdist.utils.ranges import arange_segments

# The accepted tokens of a model's block before any was verified; the weight of that, in blocks; and the
# half-life of what a sequence's own blocks brought, and of all sequences' blocks.
PRIOR_ACCEPTED = 2.0
PRIOR_BLOCKS = 4.0
OWN_BLOCKS, ALL_BLOCKS = 16, 512
# Where a sequence learns alone it knows little of either source: memory must promise this much more.
MARGIN_ALONE = 1.6
# Of the tokens per nanosecond of the last rounds.
ROUND_MEMORY = 0.95
# As of what the model must add: specdist.theory.rounds.
LEAST_GAIN = 0.02
# Of the model's last blocks, in a history.
NUM_BLOCK_NUMBERS = 2
NO_MATCH = 0
NUM_MATCH_CLASSES = len(CLASS_STARTS) + 1
_CLASS_OF = np.searchsorted(CLASS_STARTS, np.arange(MAX_MATCH + 1), side="right")


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Attributes:
    max_tokens: of one block from memory.
    max_model_tokens: of one block of the model; 0 where there is none.
    least_chance: of a token that is proposed, that it and all before it are right.
    learns_together: chances may be learned from all sequences: no token depends on them, or the run fixes
        the distribution alone.
    costs: times of passes, where they may decide; for a run whose blocks may depend on the batch.
    texts: what it looks through besides a sequence's own text.
    """

    max_tokens: int
    max_model_tokens: int
    least_chance: float
    learns_together: bool
    costs: CostModel | None = None
    texts: TextSettings = NO_TEXTS


class ModelBlocks:
    """A sequence's history: accepted tokens and number of the model's last blocks; then how many candidates
    of its last block were from memory, and which.

    A preempted sequence goes back to the beginning of its last block, and the same random numbers decide
    about its candidates again: with other candidates, for memory may know more by then, they were not fair.
    """

    def __init__(self, max_tokens: int) -> None:
        """``max_tokens``: of a block."""
        self.initial_history = (0.0,) * (NUM_BLOCK_NUMBERS + 1 + max_tokens)

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        histories_RH = blocks.histories_RH.copy()
        histories_RH[:, :NUM_BLOCK_NUMBERS] *= 0.5 ** (1 / OWN_BLOCKS)
        histories_RH[:, 0] += blocks.num_accepted_R
        histories_RH[:, 1] += 1
        return histories_RH


def noted_block(found: Proposals, max_tokens: int) -> np.ndarray:
    """[R, 1 + max_tokens]: proposals as a part of histories, after the first ``NUM_BLOCK_NUMBERS``."""
    numbers = np.zeros((len(found.lengths_R), 1 + max_tokens))
    numbers[:, 0] = found.lengths_R
    lines_C = np.repeat(np.arange(len(found.lengths_R)), found.lengths_R)
    numbers[lines_C, 1 + arange_segments(found.lengths_R)] = found.token_ids_C
    return numbers


def repeated_blocks(histories_RH: np.ndarray, are_wanted_R: np.ndarray) -> Proposals:
    """What :func:`noted_block` has noted, of some rows."""
    lengths_R = np.where(are_wanted_R, histories_RH[:, NUM_BLOCK_NUMBERS].astype(np.int64), 0)
    lines_C = np.repeat(np.arange(len(lengths_R)), lengths_R)
    tokens_C = histories_RH[lines_C, NUM_BLOCK_NUMBERS + 1 + arange_segments(lengths_R)].astype(np.int64)
    return Proposals(tokens_C, np.ones(len(tokens_C)), lengths_R, np.zeros_like(lengths_R))


def match_classes(match_lengths_R: np.ndarray) -> np.ndarray:
    """[R]: ``NO_MATCH``, or the class of the match's length."""
    return np.where(match_lengths_R > 0, _CLASS_OF[match_lengths_R], NO_MATCH)


class SourceChoice:
    """Compares the two sources, and learns what the model's blocks bring."""

    def __init__(self, settings: MemorySettings) -> None:
        self._settings = settings
        # Accepted tokens, candidates and blocks of the model, by match; decaying.
        self._brought = np.zeros((NUM_MATCH_CLASSES, 3))
        self._num_tokens, self._ns = 0.0, 0.0
        # Tokens that memory adds to a sequence's round; nothing is known yet.
        self._gain = 1.0

    @property
    def is_worth_asking(self) -> bool:
        """Whether memory's tokens are worth a message in every round, where the model's are not."""
        return self._gain > LEAST_GAIN

    def observe_blocks(
        self, classes_R: np.ndarray, num_drafted_R: np.ndarray, num_accepted_R: np.ndarray
    ) -> None:
        """Verified blocks of the model, also those without candidates, and the match that there was."""
        if not len(classes_R):
            return
        self._brought *= 0.5 ** (len(classes_R) / ALL_BLOCKS)
        np.add.at(
            self._brought,
            classes_R,
            np.stack([num_accepted_R, num_drafted_R, np.ones_like(num_drafted_R)], axis=1),
        )

    def observe_memory(self, num_accepted: int, num_rows: int) -> None:
        """Of a round, so many tokens from memory."""
        if num_rows:
            self._gain = ROUND_MEMORY * self._gain + (1 - ROUND_MEMORY) * num_accepted / num_rows

    def observe_round(
        self, num_tokens: int, *, num_pass_tokens: int, num_rows: int, num_steps: int, num_context: float
    ) -> None:
        """A round has committed so many tokens, after so many draft steps."""
        costs = self._settings.costs
        if costs is None or not num_rows:
            return
        ns = costs.pass_ns(num_pass_tokens, num_rows, num_context) + costs.message.at(num_rows)
        if num_steps:
            ns += num_steps * costs.step_ns(num_rows, num_context) + costs.turns.at(num_rows)
        self._num_tokens = ROUND_MEMORY * self._num_tokens + num_tokens
        self._ns = ROUND_MEMORY * self._ns + ns

    def lengths(
        self,
        chances_C: np.ndarray,
        lengths_R: np.ndarray,
        *,
        num_pass_tokens: int,
        num_rows: int,
        num_context: float,
    ) -> tuple[np.ndarray, float]:
        """[R]: how many of each sequence's proposed tokens pay, and what verifying one of them costs, in
        tokens. ``num_pass_tokens``: of the pass without them."""
        costs = self._settings.costs
        if costs is None or not len(chances_C):
            return lengths_R, 0.0
        # Chances fall along a block, so the best tokens of the batch are the first ones of each block.
        order_C = np.argsort(-chances_C, kind="stable")
        pass_ns = costs.target_ns(num_pass_tokens + np.arange(len(chances_C) + 1), num_rows, num_context)
        plain_ns = costs.pass_ns(num_rows, num_rows, num_context) + costs.message.at(num_rows)
        rate = max(num_rows / max(1.0, plain_ns), self._num_tokens / max(1.0, self._ns))
        cost = rate * (pass_ns - pass_ns[0])
        best = int(np.argmax(np.r_[0.0, chances_C[order_C].cumsum()] - cost))
        lines_C = np.repeat(np.arange(len(lengths_R)), lengths_R)
        kept_R = np.bincount(lines_C[order_C[:best]], minlength=len(lengths_R))
        return kept_R, float(cost[best]) / max(1, best)

    def worth_of_model(
        self, classes_R: np.ndarray, histories_RH: np.ndarray, token_cost: float = 0.0
    ) -> np.ndarray:
        """[R]: of the block that the model would draft, which memory must exceed. ``token_cost``: of
        verifying a token, in tokens."""
        prior_RN = self._mean_blocks()[classes_R]
        accepted_R, num_blocks_R = histories_RH[:, :NUM_BLOCK_NUMBERS].T
        accepted_R = (PRIOR_BLOCKS * prior_RN[:, 0] + accepted_R) / (PRIOR_BLOCKS + num_blocks_R)
        margin = 1.0 if self._settings.learns_together else MARGIN_ALONE
        return margin * np.maximum(0.0, accepted_R - token_cost * prior_RN[:, 1])

    @staticmethod
    def lengths_ahead(
        chances_C: np.ndarray, lengths_R: np.ndarray, bases_R: np.ndarray, worth_R: np.ndarray
    ) -> np.ndarray:
        """[R]: how many of the proposed tokens to append to what a draft that works ahead has ready.

        The draft goes on after whatever there is; what it prepares, of the worth of a model's block, is lost
        if any token before is rejected.

        Args:
            bases_R: the chance that everything before the first of these tokens is right.
        """
        lines_C = np.repeat(np.arange(len(lengths_R)), lengths_R)
        sums_C = chances_C.cumsum()
        starts_R = np.r_[0.0, sums_C][np.cumsum(lengths_R) - lengths_R]
        values_C = sums_C - starts_R[lines_C] + chances_C * worth_R[lines_C]
        best_R = bases_R * worth_R
        np.maximum.at(best_R, lines_C, values_C)
        kept_R = np.zeros_like(lengths_R)
        is_best_C = (values_C == best_R[lines_C]) & (values_C > (bases_R * worth_R)[lines_C])
        np.maximum.at(kept_R, lines_C[is_best_C], arange_segments(lengths_R)[is_best_C] + 1)
        return kept_R

    def _mean_blocks(self) -> np.ndarray:
        """[classes, 2]: accepted tokens and candidates of a model's block after such a match."""
        first = min(PRIOR_ACCEPTED, float(self._settings.max_model_tokens))
        if not self._settings.learns_together:
            return np.tile([first, first], (NUM_MATCH_CLASSES, 1))
        total = self._brought.sum(axis=0)
        of_all = (PRIOR_BLOCKS * first + total[:2]) / (PRIOR_BLOCKS + total[2])
        return (PRIOR_BLOCKS * of_all + self._brought[:, :2]) / (PRIOR_BLOCKS + self._brought[:, 2:])
