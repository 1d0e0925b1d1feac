"""Damaged files of every kind that the job reads, one after the other.

One file at a time is spoiled, and the job started on it, in a process of its own with a time limit, into the
folder of an earlier run. The job must end well, with rows that can be right, or refuse with a message that
names what it refuses; what the earlier run had finished must stay as it was, byte by byte.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import yaml
from datasets import Dataset

from specdist.data.leases.heartbeat import Beat, Process
from specdist.data.leases.leases import Holding
from specdist.data.run.merging import merge_run
from specdist.data.run.parts import PartLog
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.rows import RowResult
from specdist.data.stats.shard import Stats
from specdist.utils.errors import UserError
from tests.job import mutations
from tests.job.heads import write_heads
from tests.job.launching import read_output, run_here, shard_bytes
from tests.job.pair import build_pair
from tests.job.telling import run_and_tell

NUM_ROWS = 12
NUM_SHARDS = 4
TIMEOUT_S = 40
# The shards that the earlier run had finished, and the one that it was working on.
FINISHED, UNFINISHED = (0, 1), 2
RUN = "run"
DEAD_REPLICA = "gone-1-ab12"
RESULT_NAMES = [item.name for item in fields(RowResult)]


class Fault(AssertionError):
    """An outcome that must never happen."""


@dataclass(frozen=True)
class Subject:
    """A kind of file: where in a world it is, how it is damaged, and what reads it.

    ``options`` are relative to the world. ``named``: what a message may call it instead of its name.
    """

    path: str
    ways: tuple[mutations.Mutation, ...]
    options: dict[str, str] = field(default_factory=dict)
    named: tuple[str, ...] = ()

    @property
    def is_of_the_run(self) -> bool:
        return self.path.startswith(f"{RUN}/")


def _prompts(path: str, ways: tuple[mutations.Mutation, ...], folder: str | None = None) -> Subject:
    return Subject(path, ways, {"prompts": folder or path}, ("--prompts",))


def _model(name: str, ways: tuple[mutations.Mutation, ...]) -> Subject:
    return Subject(f"target/{name}", ways, {}, ("--target",))


HEAD = {"policy": "specdecpp", "head": "head"}
SUBJECTS = {
    "arrow file": _prompts("prompts.arrow", mutations.BYTES),
    "arrow stream": _prompts("stream.arrow", mutations.BYTES),
    "save_to_disk data": _prompts("saved/data-00000-of-00001.arrow", mutations.BYTES, "saved"),
    "save_to_disk state": _prompts("saved/state.json", mutations.JSON, "saved"),
    "parquet": _prompts("prompts.parquet", mutations.BYTES),
    "jsonl": _prompts("prompts.jsonl", mutations.JSONL),
    "yaml": Subject("config.yaml", mutations.YAML, {"config": "config.yaml"}, ("--",)),
    "safetensors": _model("model-00002-of-00003.safetensors", mutations.SAFETENSORS),
    "weight index": _model("model.safetensors.index.json", mutations.JSON),
    "config.json": _model("config.json", mutations.JSON),
    "tokenizer.json": _model("tokenizer.json", mutations.JSON),
    "tokenizer_config.json": _model("tokenizer_config.json", mutations.JSON),
    "generation_config.json": _model("generation_config.json", mutations.JSON),
    "head.json": Subject("head/head.json", mutations.JSON, HEAD, ("--head",)),
    "head.safetensors": Subject("head/head.safetensors", mutations.SAFETENSORS, HEAD, ("--head",)),
    "manifest": Subject(f"{RUN}/manifest.json", mutations.JSON, {}, ("--output",)),
    "part log": Subject(f"{RUN}/parts/shard-00002.00001.jsonl", mutations.JSONL),
    "lease": Subject(f"{RUN}/leases/shard-00002.00001", mutations.JSON),
    "heartbeat": Subject(f"{RUN}/leases/{DEAD_REPLICA}.beat", mutations.JSON),
    "statistics": Subject(f"{RUN}/stats/shard-00001.json", mutations.JSON),
    "record": Subject(f"{RUN}/shards/shard-00001.json", mutations.JSON),
    "shard": Subject(f"{RUN}/shards/shard-00001.arrow", mutations.BYTES),
}  # fmt: skip


class World:
    """Whole files of every kind, and an earlier run that has ended in the middle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "world"
        pair = build_pair(folder / "pair")
        shutil.copytree(pair.target, self.folder / "target")
        shutil.copytree(pair.draft, self.folder / "draft")
        shutil.copytree(write_heads(pair)["specdecpp"], self.folder / "head")
        table = pa.ipc.open_file(pair.prompts).read_all().slice(0, NUM_ROWS)
        self._write_prompts(table)
        self.prompts: list[str] = table["prompt"].to_pylist()
        whole = folder / "whole"
        assert run_here(**self.options(self.folder), output=whole).code == 0
        self.shards = shard_bytes(whole)
        self.completions = read_output(whole)["completion_ids"].to_pylist()
        self._write_earlier_run(whole)

    def options(self, folder: Path, **changes: str) -> dict[str, Any]:
        """Of the job, with ``changes`` relative to a world's folder."""
        paths = {"prompts": "prompts.arrow", "target": "target", "draft": "draft"} | changes
        if "config" in paths:
            return {"config": folder / paths["config"]}
        found = {name: value if name == "policy" else folder / value for name, value in paths.items()}
        return {
            "device": "cpu", "temperature": 0, "max_new_tokens": 8, "lease_timeout": 1,
            "rows_per_shard": NUM_ROWS // NUM_SHARDS, **found,
        }  # fmt: skip

    def _write_prompts(self, table: pa.Table) -> None:
        with pa.ipc.new_file(self.folder / "prompts.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
        with pa.ipc.new_stream(self.folder / "stream.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
        pa.parquet.write_table(table, self.folder / "prompts.parquet")
        dataset = Dataset(table)
        dataset.save_to_disk(self.folder / "saved")
        dataset.to_json(self.folder / "prompts.jsonl")

    def _write_earlier_run(self, whole: Path) -> None:
        """Two shards are finished; of the third a replica that has died had some rows."""
        run = self.folder / RUN
        shutil.copytree(whole, run)
        shutil.rmtree(run / "logs")
        for path in [path for name in ("shards", "stats", "leases") for path in (run / name).iterdir()]:
            if path.name[:11] not in {f"shard-{shard:05d}" for shard in FINISHED}:
                path.unlink()
        rows = pa.ipc.open_file(RunFolder(whole).data_path(UNFINISHED)).read_all().to_pylist()
        with PartLog(RunFolder(run).parts_path(UNFINISHED, 1)) as log:
            for row in rows[:-1]:
                log.append(RowResult(**{name: row[name] for name in RESULT_NAMES if name in row}))
            log.snapshot(Stats().to_json())
        (run / "leases" / f"shard-{UNFINISHED:05d}.00001").write_text(
            json.dumps(asdict(Holding(DEAD_REPLICA, "2026-01-01")))
        )
        beat = Beat(DEAD_REPLICA, replace(Process.current(), started=1), silent_after_s=1)
        (run / "leases" / f"{DEAD_REPLICA}.beat").write_bytes(beat.to_bytes())
        options = {name: str(value) for name, value in self.options(self.folder).items()}
        (self.folder / "config.yaml").write_text(yaml.safe_dump(options))


@dataclass(frozen=True)
class Trial:
    """One damaged file and the outcome of the job."""

    world: World
    subject: Subject
    folder: Path

    def outcome(self) -> str:
        """``ended well`` or ``refused``. Raises :class:`Fault`."""
        before = {name: self.world.shards[name] for name in shard_bytes(self.folder / RUN)}
        damaged = (self.folder / self.subject.path).name
        options = self.world.options(self.folder, **self.subject.options)
        said = self._launch(options, RUN)
        after = shard_bytes(self.folder / RUN)
        for name, content in before.items():
            if name != damaged and after.get(name) != content:
                raise Fault(f"{name} of the earlier run has changed")
        if said is None:
            self._check_run(after, damaged)
            return "ended well"
        if not self.subject.is_of_the_run and "--output holds a run with different" in said:
            if self._launch(options, "fresh") is not None:
                return "refused"
            self._check_rows(self.folder / "fresh")
            return "ended well"
        return "refused"

    def _launch(self, options: dict[str, Any], name: str) -> str | None:
        """The message of a refusal."""
        told = self.folder / f"{name}.txt"
        code, said = run_and_tell(told, TIMEOUT_S, **options, output=self.folder / name)
        if code is None:
            raise Fault(f"no end after {TIMEOUT_S} s: {said[-2000:]}")
        if "Traceback" in said or code not in (0, 2):
            raise Fault(f"exit code {code}: {said[-4000:]}")
        if code == 0:
            return None
        message = said.rpartition("error: ")[2]
        names = ((self.folder / self.subject.path).name, *self.subject.named, "--output holds a run with")
        if not any(name in message for name in names) or len(message.split()) < 3:
            raise Fault(f"the message says too little: {said[-2000:]}")
        return message

    def _check_run(self, after: dict[str, bytes], damaged: str) -> None:
        """The run was completed, and every shard is what it would have been without damage."""
        if after == self.world.shards:
            return
        if {**after, damaged: b""} != {**self.world.shards, damaged: b""}:
            raise Fault("the completed run has other bytes")
        # Damage that does not change the size is found when shards are read.
        try:
            merge_run(RunFolder(self.folder / RUN), self.folder / "merged.arrow")
        except UserError as error:
            if damaged in str(error):
                return
        raise Fault(f"{damaged} is damaged, and merging does not tell")

    def _check_rows(self, output: Path) -> None:
        """Rows in order, each with a completion or a reason; undamaged prompts have their own completions."""
        rows = read_output(output)
        rows.validate(full=True)
        found = rows.to_pylist()
        samples = max(row["sample_index"] for row in found) + 1
        if [row["row_id"] for row in found] != [index // samples for index in range(len(found))]:
            raise Fault("rows are missing, or not in order")
        for row in found:
            if (row["error"] is None) != bool(row["completion_ids"]):
                raise Fault(f"neither completion nor reason: {row}")
            is_same = row["row_id"] < NUM_ROWS and row["prompt"] == self.world.prompts[row["row_id"]]
            expected = self.world.completions[row["row_id"]] if is_same else None
            if "prompts" in self.subject.options and is_same and row["completion_ids"] != expected:
                raise Fault(f"an undamaged prompt has another completion: {row}")


def trials(folder: Path, seed: int) -> Iterator[tuple[str, str, str]]:
    """Damage a file of every kind; yields kind, way and outcome (or the fault)."""
    world = World(folder)
    for kind, subject in SUBJECTS.items():
        rng = random.Random(f"{seed}-{kind}")
        way = rng.choice(subject.ways)
        place = folder / f"trial-{kind}"
        shutil.copytree(world.folder, place)
        path = place / subject.path
        config = place / "config.yaml"
        config.write_text(config.read_text().replace(str(world.folder), str(place)))
        path.write_bytes(way(rng, path.read_bytes()))
        try:
            outcome = Trial(world, subject, place).outcome()
        except Fault as fault:
            outcome = f"FAULT: {fault}"
        yield kind, way.__name__, outcome
