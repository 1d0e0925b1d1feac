"""Log-probabilities of emitted tokens and of prompts: asked of the target after its pass, kept until a
sequence ends.

They are kept by position. A sequence that was preempted emits the same tokens again, in the same places.
Pages of the cache have no logits, so a prompt that is to be scored is run as a whole, once: until then its
sequence shares no pages.

M tokens, N positions of a pass, R blocks, C accepted candidates of all of them, W sequences with next tokens,
T tokens of a pass, P tokens of prompts, L of one, K likeliest, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from specdist.engine.messages.interfaces import NO_PROMPT_TOKENS, PromptTokens, ScoresTokens
from specdist.engine.request import Completion, PromptLogprobs, Sequence, TokenLogprobs
from specdist.engine.schedule.plan import Chunk
from specdist.models.batch.flat import FlatBatch
from specdist.sampling.distributions import NOT_FINITE, SamplingSettings
from specdist.sampling.logprobs import Logprobs
from specdist.utils.ranges import ranges_from


class EmittedTokens(NamedTuple):
    """Tokens of a pass: the orders of their sequences, positions there, the indices of their logits, ids."""

    orders: list[int]
    positions: list[int]
    index_M: np.ndarray
    token_ids_M: np.ndarray

    def and_then(self, others: EmittedTokens) -> EmittedTokens:
        return EmittedTokens(
            self.orders + others.orders,
            self.positions + others.positions,
            np.concatenate([self.index_M, others.index_M]),
            np.concatenate([self.token_ids_M, others.token_ids_M]),
        )


NO_TOKENS = EmittedTokens([], [], *np.zeros((2, 0), np.int64))


class _PromptScores:
    """The scores of one prompt of L tokens, of which the first has no probability."""

    def __init__(self, num_tokens: int, num_top: int) -> None:
        self.raw_L = np.full(num_tokens, np.nan, np.float32)
        self.top_ids_LK = np.zeros((num_tokens, num_top), np.int32)
        self.top_raw_LK = np.zeros((num_tokens, num_top), np.float32)

    def note(self, places: slice, found: Logprobs, own: slice) -> None:
        self.raw_L[places] = found.raw_M[own]
        self.top_ids_LK[places], self.top_raw_LK[places] = found.top_ids_MK[own], found.top_raw_MK[own]

    def completed(self) -> PromptLogprobs:
        assert not np.isnan(self.raw_L[1:]).any()
        return PromptLogprobs(
            raw=[None, *self.raw_L[1:].tolist()],
            top_ids=[None, *self.top_ids_LK[1:].tolist()],
            top_raw=[None, *self.top_raw_LK[1:].tolist()],
        )


class LogprobBook:
    """Log-probabilities of all tokens that the running sequences have emitted, and of their prompts."""

    def __init__(self, settings: SamplingSettings) -> None:
        self._notes_emitted = settings.num_logprobs is not None
        self._num_prompt_top = settings.num_prompt_logprobs
        # Scores by the sequences' order of admission; and of this pass, parts of prompts and the places of
        # their tokens.
        self._prompts: dict[int, _PromptScores] = {}
        self._asked: list[tuple[Sequence, _PromptScores, slice]] = []
        # Log-probabilities by the sequences' order of admission, and by position.
        self._of: dict[int, dict[int, tuple[float, float, list[int], list[float]]]] = defaultdict(dict)
        # The last pass: its accepted candidates, which are asked for with the next tokens, and the indices of
        # these tokens' logits.
        self._scores: ScoresTokens | None = None
        self._accepted = NO_TOKENS
        self._next_index: dict[int, int] = {}

    def note(
        self,
        scores: ScoresTokens | None,
        batch: FlatBatch,
        sequences: list[Sequence],
        starts_R: np.ndarray,
        num_accepted_R: np.ndarray,
        next_index_W: np.ndarray,
    ) -> None:
        """A pass has run, and so many candidates of each block are accepted.

        Args:
            sequences: those of the R blocks, which begin at ``starts_R`` among the batch's tokens, and those
                of W - R contexts that are complete.
            next_index_W: of each sequence, the index of the logits of its next token.
        """
        if scores is not None and self._notes_emitted:
            orders = [sequence.order for sequence in sequences]
            index_C = ranges_from(starts_R, num_accepted_R)
            self._accepted = EmittedTokens(
                np.repeat(orders[: len(starts_R)], num_accepted_R).tolist(),
                batch.positions_T[index_C + 1].tolist(),
                index_C,
                np.asarray(batch.token_ids_T)[index_C + 1],
            )
            self._scores = scores
            self._next_index = dict(zip(orders, next_index_W.tolist(), strict=True))
        self._note_prompts(scores)

    def note_next_tokens(self, sequences: list[Sequence], token_ids: list[int]) -> None:
        """What these sequences' next tokens are, before the next pass. That of a resumed sequence was noted
        before it was preempted."""
        pairs = zip(sequences, token_ids, strict=True)
        drawn = [each for each in pairs if each[0].forced_next_token is None and each[1] != NOT_FINITE]
        if self._scores is not None:
            self._ask(
                EmittedTokens(
                    [sequence.order for sequence, _ in drawn],
                    [len(sequence.token_ids) for sequence, _ in drawn],
                    np.array([self._next_index[sequence.order] for sequence, _ in drawn], np.int64),
                    np.array([token_id for _, token_id in drawn], np.int64),
                )
            )

    def _ask(self, tokens: EmittedTokens) -> None:
        """Ask for these tokens of the last pass, and for its accepted candidates, once."""
        tokens, self._accepted = self._accepted.and_then(tokens), NO_TOKENS
        if not tokens.orders:
            return
        assert self._scores is not None
        found = self._scores.logprobs(tokens.index_M, tokens.token_ids_M)
        columns = found.raw_M, found.processed_M, found.top_ids_MK, found.top_raw_MK
        lines = zip(*(column.tolist() for column in columns), strict=True)
        for order, position, line in zip(tokens.orders, tokens.positions, lines, strict=True):
            self._of[order][position] = line

    def prompt_tokens(self, chunks: list[Chunk], first: int) -> PromptTokens:
        """The tokens of a pass that are to be scored, of prompts that are not known; the chunks begin at
        index ``first`` of its tokens."""
        self._asked = []
        indices, token_ids = [], []
        for chunk in chunks if self._num_prompt_top is not None else ():
            sequence, size = chunk.sequence, chunk.end - chunk.begin
            if sequence.runs_whole_prompt:
                # The logits of a token are those of the token after it.
                end = min(chunk.end + 1, sequence.num_prompt_tokens)
                scores = self._prompts.setdefault(
                    sequence.order, _PromptScores(sequence.num_prompt_tokens, self._num_prompt_top or 0)
                )
                self._asked.append((sequence, scores, slice(chunk.begin + 1, end)))
                indices.append(np.arange(first, first + end - chunk.begin - 1))
                token_ids += sequence.token_ids[chunk.begin + 1 : end]
            first += size
        if not token_ids:
            return NO_PROMPT_TOKENS
        return PromptTokens(np.concatenate(indices), np.array(token_ids, np.int64))

    def _note_prompts(self, scores: ScoresTokens | None) -> None:
        found, begin = None, 0
        for sequence, prompt, places in self._asked:
            # Only now: of a pass that has failed, nothing is known.
            sequence.runs_whole_prompt = places.stop < sequence.num_prompt_tokens
            size = places.stop - places.start
            if size:
                assert scores is not None
                found = found or scores.prompt_logprobs()
                prompt.note(places, found, slice(begin, begin + size))
            begin += size

    def completed(self, sequence: Sequence) -> Completion:
        """The completion with the log-probabilities of all its tokens, unless it has an error."""
        self._ask(NO_TOKENS)
        completion, known = sequence.completion(), self._of.pop(sequence.order, {})
        prompt = self._prompts.pop(sequence.order, None)
        if completion.error is not None:
            return completion
        if self._num_prompt_top is not None:
            # Of one token there is nothing to run for.
            prompt = prompt or _PromptScores(sequence.num_prompt_tokens, self._num_prompt_top)
            completion = dataclasses.replace(completion, prompt_logprobs=prompt.completed())
        if not self._notes_emitted:
            return completion
        first = sequence.num_prompt_tokens
        lines = [known[position] for position in range(first, first + len(completion.token_ids))]
        logprobs = TokenLogprobs(
            raw=[line[0] for line in lines],
            processed=[line[1] for line in lines],
            top_ids=[line[2] for line in lines],
            top_raw=[line[3] for line in lines],
        )
        return dataclasses.replace(completion, logprobs=logprobs)
