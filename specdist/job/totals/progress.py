"""The progress of the run: a bar on a terminal, a line a minute in a log file."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter

from tqdm import tqdm

from specdist.data.stats.rows import RowResult

# Seconds between lines in a log file.
LINE_INTERVAL_S = 60.0

logger = logging.getLogger(__name__)


class Progress:
    """Counts completions. Those of an earlier run fill the bar but are not part of rates."""

    def __init__(self, num_total: int, num_done: int) -> None:
        self._bar = tqdm(
            total=num_total,
            initial=num_done,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            smoothing=0,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt} of {total_fmt} rows{postfix}, {remaining} left",
        )
        self._num_total = num_total
        # Completions of the whole run, and of every shard that is not known to be complete; then those that
        # this replica has finished, and their tokens.
        self._num_done, self._num_of_shard = num_done, Counter[int]()
        self._num_new = self._num_tokens = self._num_drafted = self._num_accepted = 0
        self._start = self._line_at = time.monotonic()

    def found(self, shard: int, num_rows: int) -> None:
        """Count completions of a shard that are there, some by an earlier run or another replica."""
        self._skip(num_rows - self._num_of_shard[shard])
        self._num_of_shard[shard] = num_rows

    def completed(self, shard: int, num_rows: int) -> None:
        """All of its so many are."""
        self._skip(num_rows - self._num_of_shard.pop(shard, 0))

    def _skip(self, num_rows: int) -> None:
        self._num_done += num_rows
        if num_rows and not self._bar.disable:
            self._bar.initial += num_rows
            self._bar.n += num_rows
            self._bar.refresh()

    def add(self, result: RowResult, shard: int) -> None:
        """Count a completion that this replica has finished."""
        self._num_of_shard[shard] += 1
        self._num_done += 1
        self._num_new += 1
        self._num_tokens += result.num_completion_tokens
        self._num_drafted += result.num_draft_tokens
        self._num_accepted += result.num_accepted_draft_tokens
        self._bar.set_postfix_str(self._rates(), refresh=False)
        self._bar.update(1)
        now = time.monotonic()
        if self._bar.disable and now - self._line_at >= LINE_INTERVAL_S:
            self._line_at = now
            left_s = (self._num_total - self._num_done) * (now - self._start) / self._num_new
            line = "%d of %d rows, %s, about %.0f min left"
            logger.info(line, self._num_done, self._num_total, self._rates(), max(1.0, left_s / 60))

    def close(self) -> None:
        self._bar.close()

    def _rates(self) -> str:
        rates = f"{self._num_tokens / max(time.monotonic() - self._start, 1e-9):.1f} tokens/s"
        if self._num_drafted:
            rates += f", {self._num_accepted / self._num_drafted:.0%} accepted"
        return rates
