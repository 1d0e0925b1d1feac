"""Scalars for TensorBoard (``--tensorboard``), written once a minute and after every shard.

Each replica writes into ``tensorboard/REPLICA`` of the run folder. A restart is another replica; since steps
count the run's rows, its curves continue those of the last one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specdist.engine.engine import EngineLoad
from specdist.job.progress import Counts
from specdist.stats.shard import Stats

TENSORBOARD_FOLDER = "tensorboard"
INTERVAL_S = 60.0


class Scalars:
    """The scalars of one replica."""

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
        if self._clock() - self._written_at >= INTERVAL_S:
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
