"""Finished rows to learn from: a bounded number of tokens, of which the latest judge the draft."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

# Of a row what comes later is not kept: the passes over its beginning would take most of the time.
MAX_ROW_TOKENS = 4096
LEAST_COMPLETION = 2


@dataclass(frozen=True, eq=False)
class FinishedRow:
    """``token_ids``: of the prompt and what the target has said after it, int32; ``stream_key``: of the
    random numbers of its tokens."""

    token_ids: np.ndarray
    num_prompt_tokens: int
    stream_key: int

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


class RowBuffer:
    """The latest rows are held out: they are trained on when others have come after them."""

    def __init__(self, *, max_tokens: int, num_latest: int) -> None:
        """``max_tokens``: of all rows together; the oldest go first."""
        self._max_tokens, self._num_latest = max_tokens, num_latest
        self._rows: deque[FinishedRow] = deque()
        self.num_tokens = 0

    def add(self, token_ids: np.ndarray, num_prompt_tokens: int, stream_key: int) -> None:
        """Copies the tokens. One with too little said is not kept."""
        row = FinishedRow(token_ids[:MAX_ROW_TOKENS].astype(np.int32), num_prompt_tokens, stream_key)
        if row.num_completion_tokens < LEAST_COMPLETION or len(row.token_ids) > self._max_tokens:
            return
        self._rows.append(row)
        self.num_tokens += len(row.token_ids)
        while self.num_tokens > self._max_tokens:
            self.num_tokens -= len(self._rows.popleft().token_ids)

    @property
    def latest(self) -> list[FinishedRow]:
        """Those that judge: at most half of all."""
        return list(self._rows)[len(self._rows) - min(self._num_latest, len(self._rows) // 2) :]

    @property
    def num_training(self) -> int:
        return len(self._rows) - len(self.latest)

    def draw(self, random: np.random.Generator) -> FinishedRow:
        """One to train on."""
        return self._rows[int(random.integers(self.num_training))]
