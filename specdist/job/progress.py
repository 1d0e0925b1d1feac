"""How far the run is: a bar on a terminal, a line a minute in a log file."""

from __future__ import annotations

import logging
import sys
import time

from tqdm import tqdm

from specdist.data import RowResult

LINE_INTERVAL_S = 60.0

logger = logging.getLogger(__name__)


class Progress:
    """Counts completions. Those of an earlier run fill the bar but count for no rate."""

    def __init__(self, num_total: int, num_done: int) -> None:
        self._bar = tqdm(
            total=num_total,
            initial=num_done,
            unit="row",
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            smoothing=0.05,
        )
        self._num_total = num_total
        self._num_done = num_done
        self._num_new = 0
        self._num_tokens = 0
        self._num_drafted = 0
        self._num_accepted = 0
        self._start = self._line_at = time.monotonic()

    def skip(self, num_rows: int) -> None:
        """Rows that an earlier run, or another replica, has finished."""
        self._num_done += num_rows
        self._bar.update(num_rows)

    def add(self, result: RowResult) -> None:
        """A row that has just been finished."""
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
            logger.info(
                "%d of %d rows, %s, about %.0f min left",
                self._num_done,
                self._num_total,
                self._rates(),
                left_s / 60,
            )

    def close(self) -> None:
        self._bar.close()

    def _rates(self) -> str:
        rates = f"{self._num_tokens / max(time.monotonic() - self._start, 1e-9):.1f} tokens/s"
        if self._num_drafted:
            rates += f", {self._num_accepted / self._num_drafted:.0%} accepted"
        return rates
