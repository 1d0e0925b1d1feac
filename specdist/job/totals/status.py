"""The progress of a run and its replicas, read from its folder. Imports no torch, and changes nothing."""

from __future__ import annotations

import functools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdist.config.names import launch_line
from specdist.data.leases.heartbeat import Beat, Watch, beat_path, replicas_in
from specdist.data.leases.leases import Leases
from specdist.data.run.reading import read_columns
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.shard import Stats
from specdist.job.totals.report import rollout_line
from specdist.job.totals.spending import options_of, price_text
from specdist.job.totals.totals import Total, total_of

# For replicas that have left no heartbeat.
SILENT_AFTER_S = 60.0
MAX_SHOWN = 20


@dataclass(frozen=True)
class HeldShard:
    """A leased shard, with its replica, and the time of the lease by that replica's clock."""

    shard: int
    replica: str
    since: str
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """Shards are done, running, failed (their replica has ended, none has taken them over) or waiting.

    ``num_rows`` counts completions, of ``num_expected_rows``. ``tokens_per_s`` and ``left_s`` are estimated
    from the replicas at work; None if there are none, or none has finished a row. ``costs``: what a million
    tokens of finished shards cost, if that can be told; ``next_step``: where no replica is at work;
    ``rollout``: what the function has judged so far, of a run with one.
    """

    num_shards: int
    num_done: int
    running: list[HeldShard]
    failed: list[HeldShard]
    num_waiting: int
    num_expected_rows: int
    num_rows: int
    num_tokens: int
    num_replicas: int
    tokens_per_s: float | None
    left_s: float | None
    errors: dict[str, int]
    costs: str = ""
    next_step: str = ""
    rollout: str = ""

    @property
    def is_complete(self) -> bool:
        return self.num_done == self.num_shards

    def to_json(self) -> dict[str, Any]:
        values = {"complete": self.is_complete, **asdict(self)}
        return {name: value for name, value in values.items() if value != ""}

    def lines(self) -> list[str]:
        """The status in lines for people."""
        lines = [
            f"shards    {self.num_done} of {self.num_shards} done, {len(self.running)} running, "
            f"{len(self.failed)} failed, {self.num_waiting} waiting",
            f"rows      {self.num_rows:,} of {self.num_expected_rows:,}, {self.num_tokens:,} tokens",
        ]
        if self.next_step:
            lines.append(f"work      nobody works on it: start it again with {self.next_step}")
        elif not self.is_complete:
            rate = "-" if self.tokens_per_s is None else f"{self.tokens_per_s:,.1f}"
            replicas = "1 replica" if self.num_replicas == 1 else f"{self.num_replicas} replicas"
            lines.append(f"speed     {rate} tokens/s by {replicas}")
            end = "unknown" if self.left_s is None else f"about {time.ctime(time.time() + self.left_s)}"
            lines.append(f"end       {end}")
        lines += [f"costs     {self.costs}"] if self.costs else []
        lines += [f"rollout   {self.rollout}"] if self.rollout else []
        for label, shards in (("running", self.running), ("failed", self.failed)):
            lines += [
                f"{label:<9} shard {held.shard}: {held.num_rows} rows, by {held.replica} since {held.since}"
                for held in shards[:MAX_SHOWN]
            ]
            if len(shards) > MAX_SHOWN:
                lines.append(f"{label:<9} and {len(shards) - MAX_SHOWN} more")
        lines += [f"errors    {count:,} rows: {kind}" for kind, count in self.errors.items()]
        return lines


class StatusReader:
    """Reads the status of a run repeatedly; complete shards are read only once.

    At the first read a replica on another machine counts as ended by the age of its heartbeat's file, which
    assumes that the clocks of this machine and the file server agree; later, if its heartbeat does not
    change.
    """

    def __init__(self, output: Path) -> None:
        self._folder = RunFolder(output)
        self._leases_folder = self._folder.leases_path
        self._watch = Watch(self._leases_folder, silent_after_s=SILENT_AFTER_S)
        self._leases = Leases(self._leases_folder, "", self._watch)
        self._done = set[int]()
        self._total = Total()
        self._errors: Counter[str] = Counter()

    def read(self) -> RunStatus:
        """Raises :class:`UserError` if there is no run."""
        plan = self._folder.plan()
        leased = self._leases.look().shards if self._leases_folder.is_dir() else {}
        running: list[HeldShard] = []
        failed: list[HeldShard] = []
        # A replica may hold many shards, and has a heartbeat besides.
        is_gone = functools.cache(self._is_gone)
        errors = Counter[str]()
        num_rows = num_tokens = num_waiting = 0
        judged = Stats()
        # Before the completion records: a shard that is finished meanwhile counts as finished.
        begun = set(self._folder.begun_shards())
        self._see_done()
        for shard in range(plan.num_shards):
            if shard in self._done:
                continue
            rows, stats = self._folder.part_logs(shard) if shard in begun else ([], None)
            judged.add(Stats.from_json(stats or {}))
            judged.num_completions += sum(row.error is None for row in rows)
            judged.num_attempts += sum(row.rollout_attempts or 0 for row in rows)
            judged.num_rejected_tokens += sum(row.rollout_rejected_tokens or 0 for row in rows)
            num_rows += len(rows)
            num_tokens += sum(row.num_completion_tokens for row in rows)
            errors.update(error_kind(row.error) for row in rows if row.error is not None)
            holding = self._leases.holding(leased[shard]) if shard in leased else None
            if holding is None or holding.replica is None:
                num_waiting += 1
                continue
            held = HeldShard(shard, holding.replica, holding.since, len(rows))
            (failed if is_gone(holding.replica) else running).append(held)
        beats = list(self._beats(is_gone))
        num_rows += self._total.num_rows
        num_expected = plan.num_completions
        info, words = self._folder.manifest.info, ["--config", str(self._folder.config_path)]
        is_idle = len(self._done) < plan.num_shards and all(map(is_gone, replicas_in(self._leases_folder)))
        judged.add(self._total.stats)
        rows_per_s = sum(beat.num_rows / beat.elapsed_s for beat in beats)
        return RunStatus(
            num_shards=plan.num_shards,
            num_done=len(self._done),
            running=running,
            failed=failed,
            num_waiting=num_waiting,
            num_expected_rows=num_expected,
            num_rows=num_rows,
            num_tokens=num_tokens + self._total.stats.num_completion_tokens,
            num_replicas=len(beats),
            tokens_per_s=sum(beat.num_tokens / beat.elapsed_s for beat in beats) if beats else None,
            left_s=(num_expected - num_rows) / rows_per_s if rows_per_s else None,
            errors=dict((self._errors + errors).most_common()),
            costs=self._costs(),
            next_step=launch_line(info["world_size"], words, device=info["device"]) if is_idle else "",
            rollout=f"{rollout_line(judged)}; {sum(beat.num_waiting for beat in beats):,} rows wait for one"
            if "rollout" in self._folder.manifest.fingerprint
            else "",
        )

    def _costs(self) -> str:
        info = self._folder.manifest.info
        figures = self._total.stats.summary(info.get("world_size", 1))
        return price_text(options_of(self._folder.config_path), figures["tokens_per_s_per_device"])

    def _see_done(self) -> None:
        new = self._folder.complete_among(sorted(self._folder.recorded_shards() - self._done))
        found = total_of(self._folder, new)
        self._errors.update(error_kinds(self._folder, found.error_shards))
        self._total.add(found)
        self._done.update(new)

    def _beats(self, is_gone: Callable[[str], bool]) -> Iterable[Beat]:
        for name in replicas_in(self._leases_folder):
            beat = self._watch.beat(name)
            if beat is not None and beat.elapsed_s > 0 and not is_gone(name):
                yield beat

    def _is_gone(self, replica: str) -> bool:
        is_at_work = self._watch.is_at_work(replica)
        if is_at_work is not None:
            return not is_at_work
        beat = self._watch.beat(replica)
        try:
            age_s = time.time() - beat_path(self._leases_folder, replica).stat().st_mtime
        except OSError:
            return True
        return age_s > (beat.silent_after_s if beat is not None else SILENT_AFTER_S)


def error_kinds(folder: RunFolder, shards: Iterable[int]) -> Counter[str]:
    """How many rows of finished shards have errors of each kind."""
    kinds = Counter[str]()
    for shard in shards:
        table = read_columns(folder.data_path(shard), ["error"])
        kinds.update(error_kind(error) for error in table["error"].drop_null().to_pylist())
    return kinds


def error_kind(reason: str) -> str:
    """An error's text without its numbers, so that errors of one kind are counted together."""
    return re.sub(r"\d+", "N", reason)
