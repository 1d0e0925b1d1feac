"""Runs with the project's own leases and part logs, on a virtual clock and without models.

A replica runs so many sequences at a time. A pass over b of them takes ``PASS_S + ROW_S * b`` and gives each
a token. Lengths of completions are log-normal around a power of the prompt's length. Replicas may be killed,
paused past the age of their leases, or told to stop.
"""

from __future__ import annotations

import dataclasses
import heapq
import logging
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pyarrow as pa
import pyarrow.ipc

from specdist.data.formats.prompts import open_prompts
from specdist.data.leases.membership import Membership
from specdist.data.leases.opening import open_run_folder
from specdist.data.run.manifest import Manifest, ShardPlan
from specdist.data.run.run_folder import RunFolder
from specdist.engine.request import Completion, Request
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.job.recording.recording import Recorder
from specdist.job.recording.uploads import Uploads
from specdist.job.rows.lengths import ExpectedLengths
from specdist.job.rows.row_requests import RowRequests
from specdist.job.run.preflight import RunPlan
from specdist.job.texts.tokens import PromptEncoder
from specdist.job.totals.progress import Progress

# A pass of a 70B target over a batch, and its growth per sequence; seconds between looks of a simulated
# replica.
PASS_S, ROW_S = 0.03, 0.0003
STEP_S = 0.25
SILENT_AFTER_S = 60.0
# A run that takes so long will not end.
MAX_S = 5000.0


@dataclass(frozen=True, kw_only=True)
class TailScenario:
    """About once in ``life_s`` a replica is killed, paused or stopped; another one joins in the place of one
    that has ended."""

    num_replicas: int = 3
    num_shards: int = 4
    rows_per_shard: int = 24
    max_num_seqs: int = 4
    num_samples: int = 1
    median_tokens: float = 200.0
    life_s: float = math.inf
    seed: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_shards * self.rows_per_shard


@dataclass
class TailOutcome:
    """``num_repeated``: completions that were generated again."""

    num_repeated: int = 0
    num_disturbed: int = 0


class TailSimulation:
    """Runs a scenario in ``folder``, which is new."""

    def __init__(self, folder: Path, scenario: TailScenario) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self.scenario, self.rng, self.outcome = scenario, random.Random(scenario.seed), TailOutcome()
        folder.mkdir(parents=True)
        prompt_sizes = [max(1, round(self.rng.lognormvariate(5, 1))) for _ in range(scenario.num_rows)]
        self.lengths = [
            min(
                4096,
                1 + int(self.rng.lognormvariate(math.log(scenario.median_tokens * (size / 150) ** 0.5), 0.9)),
            )
            for size in prompt_sizes
        ]
        table = pa.table({"prompt": ["x" * size for size in prompt_sizes]})
        with pa.ipc.new_file(str(folder / "prompts.arrow"), table.schema) as writer:
            writer.write_table(table)
        self.output = folder / "run"
        self.prompts = open_prompts(
            str(folder / "prompts.arrow"), prompt_column="prompt", messages_column=None, limit=None
        )
        shards = ShardPlan(scenario.num_rows, scenario.rows_per_shard)
        names = ("num_rows", "rows_per_shard", "num_samples")
        self.shards = shards
        self.manifest = Manifest(fingerprint={name: getattr(scenario, name) for name in names})
        open_run_folder(self.output, self.manifest, "", overwrite=False)
        self.num_finished = Counter[tuple[int, int]]()
        self.replicas: list[TailReplica] = []

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Of several actions at the same time, the one that was asked for first comes first."""
        self._num_events += 1
        heapq.heappush(self._events, (self.now + seconds, self._num_events, action))

    def join(self) -> None:
        replica = TailReplica(self, f"replica{len(self.replicas)}")
        self.replicas.append(replica)
        self.after(0.0, replica.step)
        if self.scenario.life_s < math.inf:
            fate = self.rng.choice((replica.die, replica.pause, replica.stop))
            self.after(self.rng.expovariate(1 / self.scenario.life_s), partial(self._disturb, replica, fate))

    def _disturb(self, replica: TailReplica, fate: Callable[[], None]) -> None:
        if replica.is_at_work:
            self.outcome.num_disturbed += 1
            fate()
            if not replica.is_at_work:
                self.join()

    def run(self) -> TailOutcome:
        random.seed(self.scenario.seed)
        logging.disable(logging.WARNING)
        for _ in range(self.scenario.num_replicas):
            self.join()
        while not all(replica.has_ended for replica in self.replicas) and self.now < MAX_S:
            self.now, _, action = heapq.heappop(self._events)
            action()
        logging.disable(logging.NOTSET)
        self.outcome.num_repeated = sum(num - 1 for num in self.num_finished.values())
        return self.outcome


class _Words:
    """A tokenizer for which every prompt is one token."""

    def rendered(self, prompt: str) -> SimpleNamespace:
        return SimpleNamespace(text=prompt)

    def token_ids(self, rendered: SimpleNamespace) -> list[int]:
        return [1]


class _AtOnce(Uploads):
    """In simulated time a shard has its files at once."""

    def start(self, publish: Callable[[], bool], then: Callable[[bool], None]) -> None:
        then(publish())


class TailReplica:
    """One replica: a batch of sequences, the recorder of the job, and a place where it waits."""

    def __init__(self, simulation: TailSimulation, name: str) -> None:
        self._simulation, self.name = simulation, name
        clock = lambda: simulation.now  # noqa: E731
        self._membership = Membership(
            simulation.output, silent_after_s=SILENT_AFTER_S, clock=clock, name=name
        )
        beat = self._membership.heartbeat._beat
        beat.process = dataclasses.replace(beat.process, machine=f"machine of {name}")
        self._membership.create_folder()
        scenario = simulation.scenario
        plan = RunPlan(
            prompts=simulation.prompts,
            shards=simulation.shards,
            folder=RunFolder(simulation.output),
            manifest=simulation.manifest,
            membership=self._membership,
        )
        self._stats = StatsRecorder()
        self._recorder = Recorder(
            plan,
            RowRequests(simulation.prompts, cast(PromptEncoder, _Words()), num_samples=scenario.num_samples),
            self._stats,
            progress=Progress(scenario.num_rows * scenario.num_samples, 0),
            clock=clock,
            lengths=ExpectedLengths(simulation.prompts.sizes),
        )
        self._recorder._writer.uploads = _AtOnce()
        self._beat_at = self._paused_until = -math.inf
        self.running: dict[tuple[int, int], tuple[Request, float]] = {}
        self._requests = iter(self._recorder.requests())
        self._is_dead = self.has_ended = False

    @property
    def is_at_work(self) -> bool:
        return not (self._is_dead or self.has_ended)

    def die(self) -> None:
        """As by SIGKILL, or with its machine: nothing is released."""
        self._is_dead = self.has_ended = True

    def pause(self) -> None:
        self._paused_until = self._simulation.now + self._simulation.rng.uniform(0.5, 3) * SILENT_AFTER_S

    def stop(self) -> None:
        """As by SIGTERM: what is running is lost, and the leases are released."""
        self._recorder.close()
        self._membership.leave()
        self.has_ended = True

    def beat(self) -> None:
        if self._simulation.now >= self._beat_at:
            self._membership.heartbeat.beat()
            self._beat_at = self._simulation.now + SILENT_AFTER_S / 12

    def step(self) -> None:
        if not self.is_at_work:
            return
        simulation = self._simulation
        if simulation.now < self._paused_until:
            simulation.after(self._paused_until - simulation.now, self.step)
            return
        self.beat()
        self._recorder.tick()
        self._generate()
        self._fill()
        if self.running:
            simulation.after(STEP_S, self.step)
            return
        # The engine has ended: what other replicas hold may come free.
        if self._recorder.lease():
            self._requests = iter(self._recorder.requests())
            simulation.after(0.0, self.step)
        elif self._recorder.is_run_complete:
            self.has_ended = True
            self._recorder.close()
            self._membership.leave()
        else:
            simulation.after(self._recorder.poll_s, self.step)

    def _generate(self) -> None:
        """The tokens of a step."""
        num_tokens = STEP_S / (PASS_S + ROW_S * max(1, len(self.running)))
        for key, (request, left) in list(self.running.items()):
            if left > num_tokens:
                self.running[key] = request, left - num_tokens
                continue
            del self.running[key]
            length = self._simulation.lengths[request.row_id]
            self._simulation.num_finished[key] += 1
            self._stats.shard(request.shard).num_draft_tokens += 1
            self._recorder.record(
                Completion(
                    request=request,
                    token_ids=[request.row_id % 1000] * length,
                    text=f"of {request.row_id}",
                    finish_reason="stop",
                    num_spec_steps=1,
                    num_draft_tokens=1,
                    num_accepted_draft_tokens=1,
                )
            )

    def _fill(self) -> None:
        scenario = self._simulation.scenario
        while len(self.running) < scenario.max_num_seqs:
            request = next(self._requests, None)
            if request is None:
                return
            left = float(self._simulation.lengths[request.row_id])
            self.running[request.row_id, request.sample_index] = request, left
