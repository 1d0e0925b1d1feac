"""Many replicas that share the rows of the last shards: the recorder of the job, on a virtual clock and a
counting file system, with sequences that take random times instead of models."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest import mock

from specdist.data.leases.heartbeat import BEATS_PER_SILENCE
from specdist.data.leases.lease_folders import placed
from specdist.data.leases.leases import Lease
from specdist.data.run.layout import LEASES_FOLDER
from specdist.data.run.opening import is_open, open_run_folder
from specdist.data.run.parts import PartLog
from specdist.data.run.run_folder import RunFolder
from specdist.job.recording import recording
from tests.scale.counting import CountingFiles
from tests.scale.indexed import Indexed
from tests.scale.simulation import MIDDLE, SETUP_S, START, START_S, TAIL, Outcome, beat_at
from tests.scale.tail import SILENT_AFTER_S, STEP_S, TailReplica, TailScenario, TailSimulation

# A look is due no more often than on a file system, and statistics are written more seldom than that.
SNAPSHOT_S = 60.0


class SharingSimulation(TailSimulation):
    """Replicas that begin within ``arrival_s``, of which a share vanishes at a random moment."""

    def __init__(
        self,
        folder: Path,
        scenario: TailScenario,
        *,
        arrival_s: float = 30.0,
        vanishing: float = 0.02,
        step_s: float = 2 * STEP_S,
    ) -> None:
        super().__init__(folder, scenario)
        self.arrival_s, self.vanishing, self.step_s = arrival_s, vanishing, step_s
        self.files = CountingFiles(str(self.output))
        self.counted = Outcome()
        self.num_alive = 0

    @property
    def phase(self) -> str:
        if self.now >= self.counted.first_waiting_s:
            return TAIL
        return START if self.now < START_S else MIDDLE

    @property
    def expected_s(self) -> float:
        """About when the run is complete."""
        scenario = self.scenario
        num_tokens = sum(map(sum, self.lengths)) / scenario.num_replicas / scenario.max_num_seqs
        return self.arrival_s + num_tokens * scenario.token_s(scenario.max_num_seqs)

    def run_counted(self) -> Outcome:
        """Until the last living replica has left."""
        for number in range(self.scenario.num_replicas):
            self.after(self.rng.uniform(0, self.arrival_s), partial(self._join, f"replica{number}"))
        with (
            self.files.patched(),
            Indexed(self, self.files).patched(),
            mock.patch.object(PartLog, "begin_sync", lambda log: None),
            mock.patch.object(PartLog, "_sync", lambda log: None),
            mock.patch.object(recording, "SNAPSHOT_INTERVAL_S", SNAPSHOT_S),
        ):
            while self.has_next:
                phase, before = self.phase, self.now
                action = self.advance()
                self.counted.replica_s[phase] += self.num_alive * (self.now - before)
                self.files.counts = self.counted.operations[self.phase]
                action()
        self.counted.end_s, self.counted.num_sub_shards = self.now, sum(self.outcome.sub_shards.values())
        complete = RunFolder(self.output)
        self.counted.published_by = {
            shard: complete.read_stats(shard)["replica"] for shard in complete.recorded_shards()
        }
        return self.counted

    def _join(self, name: str) -> None:
        replica = SharingReplica(self, placed(self.output / LEASES_FOLDER, name))
        if self.rng.random() < self.vanishing:
            self.after(self.rng.uniform(0, max(1.0, self.expected_s - self.now)), replica.die)


class SharingReplica(TailReplica):
    """Joins as a replica does before it works."""

    def __init__(self, simulation: SharingSimulation, name: str) -> None:
        super().__init__(simulation, name)
        self._sharing = simulation
        # Nobody looks at a replica's progress.
        self._recorder._work.shards.on_done_elsewhere = lambda shard: None
        simulation.num_alive += 1
        self._beat_on()
        self._set_up()

    def _beat_on(self) -> None:
        if self.is_at_work:
            beat_at(self._membership, self._sharing.now)
            self._sharing.after(SILENT_AFTER_S / BEATS_PER_SILENCE, self._beat_on)

    def beat(self) -> None:
        """A thread of its own does, also while a replica waits."""

    def _set_up(self) -> None:
        if self.has_ended:
            return
        membership, sharing = self._membership, self._sharing
        if membership.is_settled(lambda: is_open(sharing.output, sharing.manifest, "")):
            self.step()
        elif (lease := membership.take_setup(view := membership.leases.look())) is not None:
            sharing.after(SETUP_S, partial(self._open, lease))
        else:
            sharing.after(membership.poll_s(view.num_files, num_replicas=view.num_replicas), self._set_up)

    def _open(self, lease: Lease) -> None:
        if self.has_ended:
            return
        is_tidied = self._membership.another_has_tidied()
        open_run_folder(
            self._sharing.output, self._sharing.manifest, "", overwrite=False, is_tidied=is_tidied
        )
        self._membership.leases.release(lease)
        self.step()

    def die(self) -> None:
        if self.is_at_work:
            super().die()
            self._sharing.num_alive -= 1

    def waits(self) -> None:
        counted = self._sharing.counted
        counted.first_waiting_s = min(counted.first_waiting_s, self._sharing.now)

    def publishes(self) -> None:
        self._sharing.counted.published_s = self._sharing.now

    def ends(self) -> None:
        self._sharing.num_alive -= 1
