"""Many replicas in one process, on a virtual clock and a counting file system: the project's own leases,
heartbeats and publishing on real files, and no models. A replica's time is spent in waits and in its work,
never in file operations."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from os import utime
from pathlib import Path

import pyarrow as pa

from specdist.data.leases.heartbeat import BEATS_PER_SILENCE
from specdist.data.leases.leases import Lease
from specdist.data.leases.membership import Membership
from specdist.data.leases.opening import open_run_folder
from specdist.data.leases.shard_queue import LeasedShard, ShardQueue
from specdist.data.run.manifest import Manifest
from specdist.data.run.run_folder import RunFolder
from specdist.data.store.storage import StorePath
from tests.scale.counting import METADATA, READS, CountingFiles
from tests.scale.events import Events
from tests.scale.requests import REQUESTS, CountingStore, counting_folder

TABLE = pa.table({"row_id": [0]})
KINDS = {
    "metadata_ops_per_replica_s": METADATA,
    "reads_per_replica_s": READS,
    "requests_per_replica_s": REQUESTS,
}
START_S = 60.0
# How long a replica holds the setup.
SETUP_S = 0.5
START, MIDDLE, TAIL = PHASES = ("start", "middle", "tail")


def manifest_of(num_shards: int) -> Manifest:
    """Of a run with a row in each shard."""
    return Manifest(fingerprint={"num_rows": num_shards, "rows_per_shard": 1, "num_samples": 1})


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Replicas that begin within ``arrival_s``; shards take ``shard_s`` seconds on average, log-normally.

    ``vanishing``: share of the replicas that vanish at a random moment of the expected time, without a trace
    that others could see but silence.
    """

    num_replicas: int
    num_shards: int
    shard_s: float = 60.0
    sigma: float = 0.3
    arrival_s: float = 30.0
    silent_after_s: float = 60.0
    vanishing: float = 0.02
    seed: int = 0
    on_store: bool = False

    @property
    def expected_s(self) -> float:
        return self.arrival_s + self.shard_s * math.ceil(self.num_shards / self.num_replicas)


@dataclass
class Outcome:
    """``operations`` by phase, and ``replica_s``: the seconds that living replicas spent in it.
    ``published_by``: the replica that published each shard."""

    operations: dict[str, Counter[str]] = field(
        default_factory=lambda: {phase: Counter() for phase in PHASES}
    )
    replica_s: Counter[str] = field(default_factory=Counter)
    published_by: dict[int, str] = field(default_factory=dict)
    first_waiting_s: float = math.inf
    end_s: float = 0.0


class Simulation(Events):
    """Runs a scenario in ``folder``."""

    def __init__(self, folder: Path, scenario: Scenario) -> None:
        super().__init__()
        self.store: CountingStore | None = None
        if scenario.on_store:
            self.store, folder = counting_folder(folder)
        self.folder, self.scenario = folder, scenario
        self.rng = random.Random(scenario.seed)
        self.outcome = Outcome()
        self.files = CountingFiles(str(folder))
        self.num_alive = 0

    @property
    def phase(self) -> str:
        if self.now >= self.outcome.first_waiting_s:
            return TAIL
        return START if self.now < START_S else MIDDLE

    def run(self) -> Outcome:
        """Until the last living replica has left."""
        scenario = self.scenario
        for number in range(scenario.num_replicas):
            self.after(self.rng.uniform(0, scenario.arrival_s), partial(self._join, f"replica{number}"))
        with contextlib.ExitStack() as patches:
            patches.enter_context(self.files.patched())
            while self.has_next:
                phase, before = self.phase, self.now
                action = self.advance()
                self.outcome.replica_s[phase] += self.num_alive * (self.now - before)
                self.files.counts = self.outcome.operations[self.phase]
                if self.store is not None:
                    self.store.counts = self.files.counts
                action()
        self.outcome.end_s = self.now
        return self.outcome

    def _join(self, name: str) -> None:
        replica = Replica(self, name)
        replica.join()
        if self.rng.random() < self.scenario.vanishing:
            self.after(self.rng.uniform(START_S, self.scenario.expected_s) - self.now, replica.die)


def beat_at(membership: Membership, now: float) -> None:
    """As a file server writes it down whose clock is that of the simulation."""
    membership.heartbeat.beat()
    path = membership.heartbeat.path
    if not isinstance(path, StorePath):
        utime(path, (now, now))


class Replica:
    """One replica: it joins, takes a shard, works on it, publishes it, and waits when there is none."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self._simulation, self._name = simulation, name
        scenario = simulation.scenario
        self._membership = Membership(
            simulation.folder,
            silent_after_s=scenario.silent_after_s,
            clock=lambda: simulation.now,
            name=name,
        )
        beat = self._membership.heartbeat._beat
        beat.process = dataclasses.replace(beat.process, machine=f"machine of {name}")
        self._folder = RunFolder(simulation.folder)
        self._queue: ShardQueue | None = None
        self._leased: LeasedShard | None = None
        self._has_ended = False

    def join(self) -> None:
        self._membership.create_folder()
        self._simulation.num_alive += 1
        self._beat()
        self._set_up()

    def die(self) -> None:
        if self._queue is not None and not self._has_ended:
            self._has_ended = True
            self._simulation.num_alive -= 1

    def _beat(self) -> None:
        if not self._has_ended:
            beat_at(self._membership, self._simulation.now)
            self._simulation.after(self._simulation.scenario.silent_after_s / BEATS_PER_SILENCE, self._beat)

    def _set_up(self) -> None:
        membership, simulation = self._membership, self._simulation
        manifest = manifest_of(simulation.scenario.num_shards)
        if (lease := membership.take_setup(view := membership.leases.look())) is not None:
            simulation.after(SETUP_S, partial(self._open, manifest, lease))
        else:
            simulation.after(membership.poll_s(view.num_files), self._set_up)

    def _open(self, manifest: Manifest, lease: Lease) -> None:
        is_tidied = self._membership.another_has_tidied()
        open_run_folder(self._simulation.folder, manifest, "", overwrite=False, is_tidied=is_tidied)
        self._membership.leases.release(lease)
        self._begin(manifest)

    def _begin(self, manifest: Manifest) -> None:
        num_shards = self._simulation.scenario.num_shards
        self._queue = ShardQueue(self._folder, self._membership, manifest, num_shards)
        self._work()

    def _work(self) -> None:
        if self._has_ended:
            return
        assert self._queue is not None
        simulation, scenario = self._simulation, self._simulation.scenario
        self._leased = self._queue.take()
        if self._leased is not None:
            mean = math.log(scenario.shard_s) - scenario.sigma**2 / 2
            simulation.after(simulation.rng.lognormvariate(mean, scenario.sigma), self._finish)
        elif self._queue.is_done:
            self._leave()
        else:
            simulation.outcome.first_waiting_s = min(simulation.outcome.first_waiting_s, simulation.now)
            simulation.after(self._queue.poll_s, self._work)

    def _finish(self) -> None:
        if self._has_ended:
            return
        assert self._queue is not None and self._leased is not None
        queue, leased, outcome = self._queue, self._leased, self._simulation.outcome
        if self._folder.finish_shard(
            leased.shard, TABLE, {"by": self._name}, is_held=lambda: queue.is_held(leased)
        ):
            assert leased.shard not in outcome.published_by
            outcome.published_by[leased.shard] = self._name
            queue.finished(leased)
        else:
            queue.lost(leased)
        self._work()

    def _leave(self) -> None:
        self._has_ended = True
        self._simulation.num_alive -= 1
        self._membership.leave()


def operations(outcome: Outcome) -> dict[str, dict[str, float]]:
    """For each second of a living replica, by phase."""
    return {
        name: {
            phase: round(outcome.operations[phase][kind] / max(outcome.replica_s[phase], 1e-9), 3)
            for phase in PHASES
        }
        for name, kind in KINDS.items()
        if any(outcome.operations[phase][kind] for phase in PHASES)
    }
