"""Sequences that begin, as they are told to the draft and to the ranks of the target.

M sequences, F options of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdist.engine.request import Sequence
from specdist.sampling.processing.row_table import Processing

NO_CONTEXT = -1
NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class OpenedSequences:
    """Sequences admitted since the last request.

    Attributes:
        slots, stream_keys, num_misses, max_lengths: as of :class:`Sequence`.
        context_lengths: length of the context after which to draft ahead; ``NO_CONTEXT`` for a resumed
            sequence.
        num_prompt_tokens: [M], as all that follow only where logits are processed.
        prefixes: the first tokens of each, which share another one's pages.
        options_MF: float64.
        constraints: each one's.
    """

    slots: np.ndarray
    stream_keys: np.ndarray
    num_misses: np.ndarray
    context_lengths: np.ndarray
    max_lengths: np.ndarray
    num_prompt_tokens: np.ndarray = field(default_factory=lambda: NONE)
    prefixes: list[list[int]] = field(default_factory=list)
    options_MF: np.ndarray = field(default_factory=lambda: NONE)
    constraints: list[str] = field(default_factory=list)

    @staticmethod
    def of(sequences: list[Sequence], processing: Processing | None = None) -> OpenedSequences:
        """``processing``: of logits; the draft is then told what it does not run of a sequence."""
        if not sequences:
            return NOTHING_OPENED
        more: dict[str, Any] = {}
        if processing is not None:
            more["num_prompt_tokens"] = _numbers([each.num_prompt_tokens for each in sequences])
            more["prefixes"] = [each.token_ids[: each.num_shared] for each in sequences]
            requests = [sequence.request for sequence in sequences]
            options = [(request.options or processing.defaults).numbers for request in requests]
            more["options_MF"] = np.array(options, np.float64)
            more["constraints"] = [request.constraint for request in requests]
        contexts = [s.context_length if s.forced_next_token is None else NO_CONTEXT for s in sequences]
        return OpenedSequences(
            slots=_numbers([sequence.slot for sequence in sequences]),
            stream_keys=_numbers([sequence.stream_key for sequence in sequences]),
            num_misses=_numbers([sequence.counters.num_misses for sequence in sequences]),
            context_lengths=_numbers(contexts),
            max_lengths=_numbers([sequence.max_length for sequence in sequences]),
            **more,
        )


NOTHING_OPENED = OpenedSequences(
    slots=NONE, stream_keys=NONE, num_misses=NONE, context_lengths=NONE, max_lengths=NONE
)


def _numbers(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)
