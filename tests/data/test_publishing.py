"""Finishing a shard: a crash at any step, two replicas that finish it, and one that no longer holds it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pytest

from specdist.data.run import publishing
from specdist.data.run.manifest import Manifest
from specdist.data.run.publishing import Attempt
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.rows import shard_table
from specdist.data.store import files as files_module
from tests.data.folders import INPUTS, STATS, TABLE, TRACE, Crash, contents, crash, finish, open_
from tests.data.samples import row_result

STEPS = [
    (Attempt, "write"),
    (Attempt, "publish_data"),
    (Attempt, "publish_stats"),
    (Attempt, "publish_trace"),
    (Attempt, "publish_record"),
    (RunFolder, "sweep"),
]


CALLS = [
    (os, "fsync", 12),
    (os, "link", 1),
    (Path, "replace", 3),
    (publishing, "fsync_folder", 5),
    (Path, "unlink", 1),
]


def patch_call(patch, owner, name, crashing_call):
    """Crash in the n-th call."""
    real, num_calls = getattr(owner, name), 0

    def counted(*arguments):
        nonlocal num_calls
        num_calls += 1
        if num_calls > crashing_call:
            raise Crash
        return real(*arguments)

    patch.setattr(owner, name, counted)
    # A process that dies does not clean up.
    patch.setattr(Path, "unlink", crash)


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [(owner, name, call) for owner, name, num_calls in CALLS for call in range(num_calls)],
)
def test_a_crash_anywhere_in_finishing_ends_in_the_same_bytes(
    tmp_path, monkeypatch, whole, owner, name, call
):
    path = tmp_path / "crashed"
    folder = open_(path)
    with folder.parts(0) as log:
        for row in range(5):
            log.append(row_result(row))
    with monkeypatch.context() as patch:
        patch_call(patch, owner, name, call)
        with pytest.raises(Crash):
            folder.finish_shard(0, TABLE, STATS, TRACE)
    for name in set(contents(path)) & set(whole):
        assert contents(path)[name] == whole[name], "a half-written file has its final name"

    resumed = open_(path)
    assert not list(path.rglob("*.tmp"))
    if resumed.is_complete(0):
        assert not resumed.parts_path(0).exists()
    else:
        assert resumed.shard_stats() == []
        assert not resumed.record_path(0).exists()
        with resumed.parts(0) as log:
            assert list(log.results.values()) == [row_result(row) for row in range(5)]
        resumed.finish_shard(0, TABLE, STATS, TRACE)
    assert contents(path) == whole
    assert resumed.shard_stats() == [STATS]


def test_each_step_is_durable_before_the_next(tmp_path, monkeypatch):
    """A name is created, then its folder is synced; before that the content was synced under another name."""
    folder, events = open_(tmp_path / "run"), []
    synced = set()
    real_fsync, real_link, real_replace = os.fsync, os.link, Path.replace

    def fsync(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.add(path)
        if path.is_dir() and events and not events[-1].startswith("synced"):
            events.append(f"synced {path.name}")
        real_fsync(descriptor)

    def named(real):
        def name(source, target):
            assert Path(source) in synced
            real(source, target)
            events.append(str(Path(target).relative_to(folder.path)))

        return name

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", named(real_link))
    monkeypatch.setattr(Path, "replace", named(real_replace))
    finish(folder)
    assert events == [
        "shards/shard-00000.arrow", "synced shards",
        "stats/shard-00000.json", "synced stats",
        "stats/shard-00000.trace.arrow", "synced stats",
        "shards/shard-00000.json", "synced shards",
    ]  # fmt: skip


OTHER_TABLE = shard_table(
    INPUTS, [row_result(row, completion="another draw") for row in range(5)], first_row=0, num_samples=1
)
OTHER_STATS = {"num_drafts": 99, "wall_ns": 1}


@pytest.mark.parametrize(("owner", "step"), STEPS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_two_replicas_that_finish_a_shard_leave_one_complete_result(
    tmp_path, monkeypatch, whole, owner, step, when
):
    """The first is paused at any step, the second goes all the way, the first goes on: one of the two is
    there with all its files, also where draws differ from replica to replica."""
    folder = open_(tmp_path / "run")
    real = getattr(owner, step)
    answers = {}

    def second():
        monkeypatch.setattr(owner, step, real)
        answers["second"] = RunFolder(folder.path).finish_shard(0, OTHER_TABLE, OTHER_STATS, TRACE)

    def paused(self, *arguments):
        if when == "before":
            second()
            return real(self, *arguments)
        answer = real(self, *arguments)
        second()
        return answer

    monkeypatch.setattr(owner, step, paused)
    with folder.parts(0) as log:
        log.append(row_result(0))
    answers["first"] = folder.finish_shard(0, TABLE, STATS, TRACE)
    assert folder.is_complete(0)
    assert not list(folder.path.rglob("*.tmp")) and not list(folder.path.glob("parts/*"))
    with pa.ipc.open_file(folder.data_path(0)) as reader:
        is_first = reader.read_all() == TABLE
    record = json.loads(folder.record_path(0).read_text())
    assert record["sha256"] == files_module.sha256_of(folder.data_path(0)).hex()
    assert folder.shard_stats() == [STATS if is_first else OTHER_STATS]
    assert answers["first" if is_first else "second"]
    # Whoever comes before the data has its name wins; after that the second finds the file of the first.
    comes_first = STEPS.index((owner, step)) > 1 or (step == "publish_data" and when == "after")
    assert is_first == comes_first
    if is_first:
        assert contents(folder.path) == whole


def test_a_replica_that_no_longer_holds_a_shard_does_not_finish_it(tmp_path):
    folder = open_(tmp_path / "run")
    with folder.parts(0) as log:
        log.append(row_result(0))
    assert not folder.finish_shard(0, TABLE, STATS, TRACE, is_held=lambda: False)
    assert not folder.is_complete(0)
    assert [path.name for path in (tmp_path / "run").rglob("shard-*")] == ["shard-00000.jsonl"]


def test_a_replica_paused_while_the_run_was_overwritten_leaves_the_new_run_alone(tmp_path, monkeypatch):
    """The files that it is about to rename have been deleted."""
    folder = open_(tmp_path / "run")
    real = Attempt.publish_data

    def overwritten(self):
        monkeypatch.setattr(Attempt, "publish_data", real)
        open_(tmp_path / "run", manifest=Manifest(fingerprint={"seed": 2}), overwrite=True)
        return real(self)

    monkeypatch.setattr(Attempt, "publish_data", overwritten)
    assert not folder.finish_shard(0, TABLE, STATS, TRACE)
    assert sorted(contents(tmp_path / "run")) == ["config.yaml", "manifest.json"]


def test_the_published_attempt_is_recognised_by_its_content(tmp_path):
    """Two attempts with files of the same size; the data of one of them was published."""
    paths = open_(tmp_path / "run").paths(0)
    for path in paths.all():
        path.parent.mkdir(exist_ok=True)
    for order in (("a", "b"), ("b", "a")):
        for tag in order:
            rows = [row_result(row, completion=tag * 10) for row in range(5)]
            table = shard_table(INPUTS, rows, first_row=0, num_samples=1)
            assert Attempt(paths, tag).write(table, STATS, None)
        assert Attempt(paths, order[1]).publish_data()
        won = Attempt.that_won(paths)
        won.finish()
        assert not list(paths.record.parent.glob(f"{paths.record.name}.{order[1]}.*"))
        assert list(paths.record.parent.glob(f"{paths.record.name}.{order[0]}.*"))
        for path in (*paths.all(), *paths.record.parent.glob("*.tmp"), *paths.stats.parent.glob("*.tmp")):
            path.unlink(missing_ok=True)
