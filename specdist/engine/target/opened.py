"""Sequences that begin, as they are told to the draft and to the ranks of the target.

M sequences, F options of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from specdist.engine.messages.packing import FloatArray
from specdist.engine.request import Sequence
from specdist.sampling.processing.options import TOKEN_OPTIONS, Processing

NO_CONTEXT = -1
NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class OpenedSequences:
    """Sequences admitted since the last request.

    Attributes:
        slots, stream_keys, num_misses, max_lengths: as of :class:`Sequence`.
        context_lengths: length of the context after which to draft ahead; ``NO_CONTEXT`` for a resumed
            sequence.
        num_prompt_tokens: [M], only where the draft is to know texts: to process logits, or for memory.
        prefix_lengths, prefix_ids: and so, the first tokens of each, which share another one's pages.
        options: [M × F], only where logits are processed.
        text_lengths, text_bytes: and so, each one's constraint in UTF-8.
    """

    slots: np.ndarray
    stream_keys: np.ndarray
    num_misses: np.ndarray
    context_lengths: np.ndarray
    max_lengths: np.ndarray
    num_prompt_tokens: np.ndarray = field(default_factory=lambda: NONE)
    options: FloatArray = field(default_factory=lambda: NONE)
    prefix_lengths: np.ndarray = field(default_factory=lambda: NONE)
    prefix_ids: np.ndarray = field(default_factory=lambda: NONE)
    text_lengths: np.ndarray = field(default_factory=lambda: NONE)
    text_bytes: np.ndarray = field(default_factory=lambda: NONE)

    @staticmethod
    def of(
        sequences: list[Sequence],
        processing: Processing | None = None,
        tells_texts: bool = False,
        has_window: bool = False,
    ) -> OpenedSequences:
        """``processing``: of logits; ``tells_texts``: else too, what the draft does not run of a sequence,
        which may be any of its tokens if it ``has_window``."""
        if not sequences:
            return NOTHING_OPENED
        contexts = [s.context_length if s.forced_next_token is None else NO_CONTEXT for s in sequences]
        return OpenedSequences(
            slots=np.array([sequence.slot for sequence in sequences], np.int64),
            stream_keys=np.array([sequence.stream_key for sequence in sequences], np.int64),
            num_misses=np.array([sequence.counters.num_misses for sequence in sequences], np.int64),
            context_lengths=np.array(contexts, np.int64),
            max_lengths=np.array([sequence.max_length for sequence in sequences], np.int64),
            **(_texts(sequences, has_window) if tells_texts or processing is not None else {}),
            **({} if processing is None else _rows(sequences, processing)),
        )

    @property
    def are_resumed(self) -> np.ndarray:
        """bool [M]: whether each goes on after a preemption."""
        return self.context_lengths == NO_CONTEXT

    @property
    def options_MF(self) -> np.ndarray:
        return self.options.reshape(-1, len(TOKEN_OPTIONS))

    @property
    def prefixes(self) -> list[np.ndarray]:
        return _split(self.prefix_ids, self.prefix_lengths)

    @property
    def constraints(self) -> list[str]:
        texts = _split(self.text_bytes, self.text_lengths)
        return [text.astype(np.uint8).tobytes().decode() for text in texts]


NOTHING_OPENED = OpenedSequences(
    slots=NONE, stream_keys=NONE, num_misses=NONE, context_lengths=NONE, max_lengths=NONE
)


def _texts(sequences: list[Sequence], has_window: bool) -> dict[str, np.ndarray]:
    prefixes = [each.token_ids[: None if has_window else each.num_shared] for each in sequences]
    return {
        "num_prompt_tokens": np.array([sequence.num_prompt_tokens for sequence in sequences], np.int64),
        "prefix_lengths": np.array([len(prefix) for prefix in prefixes], np.int64),
        "prefix_ids": np.array([token_id for prefix in prefixes for token_id in prefix], np.int64),
    }


def _rows(sequences: list[Sequence], processing: Processing) -> dict[str, np.ndarray]:
    requests = [sequence.request for sequence in sequences]
    numbers = [(request.options or processing.defaults).numbers for request in requests]
    texts = [request.constraint.encode() for request in requests]
    return {
        "options": np.array(numbers, np.float64).ravel(),
        "text_lengths": np.array([len(text) for text in texts], np.int64),
        "text_bytes": np.frombuffer(b"".join(texts), np.uint8).astype(np.int64),
    }


def _split(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum(lengths))[: len(lengths)]
