"""The progress of the run: a bar on a terminal, a line a minute in a log file, scalars for TensorBoard."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specdist.data.stats.rows import RowResult
from specdist.data.stats.shard import Stats
from specdist.engine.times.reports import EngineLoad

# Between lines in a log file, and between scalars.
LINE_INTERVAL_S = 60.0
TENSORBOARD_FOLDER = "tensorboard"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """``num_done`` counts the finished completions of the whole run; the others count those that this replica
    has finished since it started."""

    num_done: int = 0
    num_new: int = 0
    num_errors: int = 0
    num_tokens: int = 0
    num_spec_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def with_row(self, result: RowResult) -> Counts:
        """The counts with one more completion."""
        return Counts(
            num_done=self.num_done + 1,
            num_new=self.num_new + 1,
            num_errors=self.num_errors + (result.error is not None),
            num_tokens=self.num_tokens + result.num_completion_tokens,
            num_spec_steps=self.num_spec_steps + result.num_spec_steps,
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
            smoothing=0.05,
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
        if num_rows:
            self.counts = replace(self.counts, num_done=self.counts.num_done + num_rows)
            self._bar.update(num_rows)

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


class Scalars:
    """One replica's scalars for TensorBoard (``--tensorboard``), written once a minute and after every shard
    into ``tensorboard/REPLICA`` of the run folder.

    A restart is another replica; since steps count the run's rows, its curves continue those of the last one.
    """

    def __init__(self, output: Path, replica: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(output / TENSORBOARD_FOLDER / replica))
        self._clock = clock
        self._written_at = clock()
        self._written = self._now = Counts()
        self._load = EngineLoad()

    def tick(self, counts: Counts, load: EngineLoad) -> None:
        """Take the latest counts; write them if a minute has passed."""
        self._now, self._load = counts, load
        if self._clock() - self._written_at >= LINE_INTERVAL_S:
            self._write()

    def shard_finished(self, counts: Counts, shard: int, stats: Mapping[str, Any]) -> None:
        """Write the statistics of a shard; shards may finish out of order."""
        self._writer.add_scalar("shard/number", shard, counts.num_done)
        figures = Stats.from_json(stats).summary()
        for name in ("tokens_per_s", "draft_acceptance_rate", "mean_acceptance_length", "num_error_rows"):
            if figures[name] is not None:
                self._writer.add_scalar(f"shard/{name}", figures[name], counts.num_done)
        self._writer.flush()

    def close(self) -> None:
        """Write the last minute's remaining counts and close the file."""
        if self._now.num_new > self._written.num_new:
            self._write()
        self._writer.close()

    def _write(self) -> None:
        """Rates are over the time since the last write; the step is the run's number of finished rows."""
        now, before, seconds = self._now, self._written, self._clock() - self._written_at
        figures: dict[str, float] = {
            "rows_done": now.num_done,
            "error_rows": now.num_errors,
            "batch_rows": self._load.num_seqs,
            "free_pages": self._load.num_free_pages,
        }
        rates = {
            "tokens_per_s": (now.num_tokens - before.num_tokens, seconds),
            "draft_acceptance_rate": (
                now.num_accepted - before.num_accepted,
                now.num_drafted - before.num_drafted,
            ),
            "mean_acceptance_length": (
                now.num_spec_steps - before.num_spec_steps + now.num_accepted - before.num_accepted,
                now.num_spec_steps - before.num_spec_steps,
            ),
        }
        figures |= {name: above / below for name, (above, below) in rates.items() if below}
        for name, value in figures.items():
            self._writer.add_scalar(f"run/{name}", value, now.num_done)
        self._writer.flush()
        self._written, self._written_at = now, self._clock()
