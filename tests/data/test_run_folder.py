from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.ipc
import pytest

from specdist.data.run.manifest import Manifest
from specdist.data.run.run_folder import RunFolder
from specdist.data.store import files as files_module
from specdist.utils.errors import UserError
from tests.data.folders import STATS, TABLE, TRACE, Crash, contents, crash, finish, open_
from tests.data.samples import row_result


def test_a_run_has_the_documented_files(tmp_path, whole):
    assert sorted(whole) == [
        "config.yaml", "manifest.json", "shards/shard-00000.arrow", "shards/shard-00000.json",
        "stats/shard-00000.json", "stats/shard-00000.trace.arrow",
    ]  # fmt: skip
    assert {path.name for path in (tmp_path / "whole").iterdir() if path.is_dir()} == {
        "logs", "parts", "shards", "stats",
    }  # fmt: skip
    assert whole["config.yaml"] == b"seed: 1\n"
    record = json.loads(whole["shards/shard-00000.json"])
    assert record["num_rows"] == 5
    assert record["num_bytes"] == len(whole["shards/shard-00000.arrow"])
    assert record["sha256"] == files_module.sha256_of(tmp_path / "whole/shards/shard-00000.arrow").hex()
    with pa.ipc.open_file(tmp_path / "whole/shards/shard-00000.arrow") as reader:
        assert reader.read_all() == TABLE


def test_the_bytes_do_not_depend_on_how_the_table_is_chunked(tmp_path, whole):
    folder = open_(tmp_path / "chunked")
    folder.finish_shard(0, pa.concat_tables([TABLE.slice(0, 2), TABLE.slice(2)]), STATS, TRACE)
    assert contents(tmp_path / "chunked") == whole


def test_input_chunks_with_different_dictionaries_can_be_written(tmp_path):
    chunks = [pa.array(["a", "b"]).dictionary_encode(), pa.array(["c"]).dictionary_encode()]
    folder = open_(tmp_path / "run")
    folder.finish_shard(0, pa.table({"label": pa.chunked_array(chunks)}), STATS)
    with pa.ipc.open_file(folder.data_path(0)) as reader:
        assert reader.read_all()["label"].to_pylist() == ["a", "b", "c"]


def test_rows_of_earlier_holders_are_kept_and_their_logs_stay(tmp_path):
    """An earlier holder may merely be paused, and later write into its own log again."""
    folder = open_(tmp_path / "run")
    with folder.parts(0) as log:
        log.append(row_result(0))
    with folder.parts(0, 1) as paused:
        paused.append(row_result(1))
        paused.snapshot({"num_drafts": 1})
        with folder.parts(0, 3) as log:
            assert list(log.results) == [(0, 0), (1, 0)] and log.stats == {"num_drafts": 1}
            paused.append(row_result(2, completion="too late"))
            log.append(row_result(1, completion="again"))
            log.append(row_result(2))
    assert folder.log_generations(0) == [0, 1, 3]
    with folder.parts(0, 4) as log:
        assert list(log.results.values()) == [
            row_result(0), row_result(1), row_result(2, completion="too late")
        ]  # fmt: skip
    assert folder.log_generations(1) == []


def test_temporary_files_of_a_leased_shard_are_not_deleted(tmp_path):
    """They may be those of a replica that is about to finish it."""
    folder = open_(tmp_path / "run")
    (folder.path / "leases").mkdir()
    (folder.path / "leases" / "shard-00000.00001").write_text("{}")
    kept = folder.path / "shards" / "shard-00000.arrow.0a1b.tmp"
    removed = folder.path / "shards" / "shard-00001.arrow.0a1b.tmp"
    for path in (kept, removed):
        path.write_bytes(b"ARROW1")
    open_(folder.path)
    assert kept.exists() and not removed.exists()
    # Unless it is complete: then it needs neither.
    folder.finish_shard(0, TABLE, STATS, TRACE)
    open_(folder.path)
    assert not kept.exists() and list((folder.path / "leases").iterdir()) == []


def test_a_shard_with_missing_files_is_incomplete_and_loses_its_record(tmp_path):
    def cut(path):
        path.write_bytes(path.read_bytes()[:-1])

    damages = [
        lambda folder: folder.data_path(0).unlink(),
        lambda folder: cut(folder.data_path(0)),
        lambda folder: folder.stats_path(0).unlink(),
        lambda folder: folder.record_path(0).unlink(),
        lambda folder: folder.record_path(0).write_text("{}"),
        lambda folder: folder.record_path(0).write_text("[]"),
        lambda folder: cut(folder.record_path(0)) or cut(folder.record_path(0)),
    ]
    for number, damage in enumerate(damages):
        folder = open_(tmp_path / str(number))
        finish(folder)
        assert folder.is_complete(0)
        damage(folder)
        assert not folder.is_complete(0)
        assert folder.shard_stats() == []
        assert not open_(folder.path).record_path(0).exists()


def test_statistics_are_those_of_complete_shards_in_order(tmp_path):
    folder = open_(tmp_path / "run")
    for shard in (10, 2, 99_999, 0):
        folder.finish_shard(shard, TABLE, {"shard": shard})
    folder.data_path(2).unlink()
    assert [stats["shard"] for stats in RunFolder(tmp_path / "run").shard_stats()] == [0, 10, 99_999]


def test_overwriting_deletes_only_what_the_run_wrote(tmp_path):
    path = tmp_path / "run"
    folder = open_(path)
    finish(folder)
    with folder.parts(1) as log:
        log.append(row_result(5))
    (path / "shards" / "shard-00003.arrow.tmp").write_bytes(b"torn")
    mine = ["notes.txt", "shards/mine.arrow", "shards/shard-1.arrow", "stats/plot.png", "logs/slurm.out"]
    for name in mine:
        (path / name).write_bytes(b"mine")
    new = Manifest(fingerprint={"seed": 2})
    assert open_(path, manifest=new, overwrite=True).manifest == new
    assert sorted(contents(path)) == sorted([*mine, "config.yaml", "manifest.json"])


def test_a_crash_while_overwriting_leaves_one_of_the_two_runs(tmp_path, monkeypatch):
    path, new = tmp_path / "run", Manifest(fingerprint={"seed": 2})
    finish(open_(path))
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "write", crash)
        with pytest.raises(Crash):
            open_(path, manifest=new, overwrite=True)
    assert not open_(path).is_complete(0)
    assert not open_(path, manifest=new, overwrite=True).is_complete(0)


def test_a_folder_that_does_not_belong_to_a_run_is_never_touched(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "shards").mkdir()
    before = contents(tmp_path)
    with pytest.raises(UserError) as raised:
        open_(tmp_path, overwrite=True)
    assert "is not empty and is not a run folder (no manifest.json; it contains shards, thesis.tex)" in str(
        raised.value
    )
    assert "give a new folder. --overwrite deletes only files that a run has written" in str(raised.value)
    (tmp_path / "manifest.json").write_text('{"name": "a web app"}')
    with pytest.raises(UserError, match=r"manifest.json is not a readable manifest of a run"):
        open_(tmp_path, overwrite=True)
    (tmp_path / "manifest.json").unlink()
    assert contents(tmp_path) == before
