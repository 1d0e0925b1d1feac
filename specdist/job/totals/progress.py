"""The progress of the run: a bar on a terminal, a line a minute in a log file."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace

from tqdm import tqdm

from specdist.data.stats.rows import RowResult

# Seconds between lines in a log file.
LINE_INTERVAL_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """``num_done`` counts the finished completions of the whole run; the others count those that this replica
    has finished since it started."""

    num_done: int = 0
    num_new: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def with_row(self, result: RowResult) -> Counts:
        """The counts with one more completion."""
        return Counts(
            num_done=self.num_done + 1,
            num_new=self.num_new + 1,
            num_tokens=self.num_tokens + result.num_completion_tokens,
            num_drafted=self.num_drafted + result.num_draft_tokens,
            num_accepted=self.num_accepted + result.num_accepted_draft_tokens,
        )


class Progress:
    """Counts completions. Those of an earlier run fill the bar but are not part of rates."""

    def __init__(self, num_total: int, num_done: int) -> None:
        self._bar = tqdm(
            total=num_total,
            initial=num_done,
            unit="row",
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            smoothing=0,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt} of {total_fmt} rows{postfix}, {remaining} left",
        )
        self._num_total = num_total
        # Of every shard that is not known to be complete, those that are counted.
        self._num_of_shard = Counter[int]()
        self.counts = Counts(num_done=num_done)
        self._start = self._line_at = time.monotonic()

    def found(self, shard: int, num_rows: int) -> None:
        """Count completions of a shard that are there, some by an earlier run or another replica."""
        self._skip(num_rows - self._num_of_shard[shard])
        self._num_of_shard[shard] = num_rows

    def completed(self, shard: int, num_rows: int) -> None:
        """All of its so many are."""
        self._skip(num_rows - self._num_of_shard.pop(shard, 0))

    def _skip(self, num_rows: int) -> None:
        self.counts = replace(self.counts, num_done=self.counts.num_done + num_rows)
        if num_rows and not self._bar.disable:
            self._bar.initial += num_rows
            self._bar.n += num_rows
            self._bar.refresh()

    def add(self, result: RowResult, shard: int) -> None:
        """Count a completion that this replica has finished."""
        self._num_of_shard[shard] += 1
        self.counts = self.counts.with_row(result)
        self._bar.set_postfix_str(self._rates(), refresh=False)
        self._bar.update(1)
        now = time.monotonic()
        if self._bar.disable and now - self._line_at >= LINE_INTERVAL_S:
            self._line_at = now
            num_done = self.counts.num_done
            left_s = (self._num_total - num_done) * (now - self._start) / self.counts.num_new
            line = "%d of %d rows, %s, about %.0f min left"
            logger.info(line, num_done, self._num_total, self._rates(), left_s / 60)

    def close(self) -> None:
        self._bar.close()

    def _rates(self) -> str:
        counts = self.counts
        rates = f"{counts.num_tokens / max(time.monotonic() - self._start, 1e-9):.1f} tokens/s"
        if counts.num_drafted:
            rates += f", {counts.num_accepted / counts.num_drafted:.0%} accepted"
        return rates
