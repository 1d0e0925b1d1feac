"""Files of a run on an S3 server: its conditional writes, and faults of its own."""

from __future__ import annotations

import errno
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.ipc
import pytest

from specdist.data.file_names import RUN_TAG
from specdist.data.formats.prompts import open_prompts
from specdist.data.leases.opening import remove_leftovers
from specdist.data.run.publishing import Attempt, ShardRecord
from specdist.data.store import object_store
from specdist.data.store.access import check_output
from specdist.data.store.files import publish
from specdist.data.store.object_store import ObjectStore, StoreError
from specdist.data.store.storage import StorePath, storage_path
from specdist.utils.errors import UserError
from tests.data.folders import MANIFEST, STATS, TABLE, TRACE, Crash, crash, finish, open_
from tests.data.s3 import Failure, S3Server, folder_of, s3_server
from tests.data.samples import row_result

OTHER_TABLE = TABLE.set_column(
    TABLE.column_names.index("completion"), "completion", pa.array(["another"] * TABLE.num_rows)
)


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        yield running


@pytest.fixture
def store(server: S3Server, tmp_path, monkeypatch) -> StorePath:
    """An empty folder in the bucket."""
    return folder_of(server, tmp_path, monkeypatch)


def test_of_many_that_create_an_object_one_does(store):
    won = []
    threads = [
        threading.Thread(target=lambda text=str(number): won.append((store / "x").create(text.encode())))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 7 + [True]


def test_an_answer_that_is_lost_is_the_writer_s_own(store, server):
    """The server creates the object and then fails: the repeated request finds it there."""
    failures = [Failure(503, "SlowDown", after_work=True)]
    server.fault = lambda method, path: failures.pop() if method == "PUT" and failures else None
    assert (store / "lease").create(b"mine") and not failures
    assert not (store / "lease").create(b"another's")


def test_requests_are_repeated_while_a_server_fails(store, server, monkeypatch):
    """For as long as a store may be out of order, and not for what will not pass."""
    waited = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=waited.append)
    monkeypatch.setattr(object_store, "time", clock)
    left = [Failure()] * 9
    server.fault = lambda method, path: left.pop() if left else None
    (store / "x").write_bytes(b"content")
    assert (store / "x").read_bytes() == b"content" and not left
    assert len(waited) == 9 and sum(waited) > 9 * waited[0]
    store.store.retry_s = 0.0
    server.fault = lambda method, path: Failure()
    with pytest.raises(StoreError, match="planted"):
        (store / "x").read_bytes()
    waited.clear()
    store.store.retry_s = 1e9
    server.fault = lambda method, path: Failure(403, "AccessDenied")
    with pytest.raises(StoreError) as refused:
        (store / "x").write_bytes(b"")
    assert refused.value.errno == errno.EACCES and not waited


def test_a_store_that_does_not_answer_is_not_taken_for_an_empty_one(store, server):
    """Otherwise a complete shard would be generated and written again."""
    folder = open_(store)
    finish(folder)
    store.store.retry_s = 0.0
    server.fault = lambda method, path: Failure(403, "AccessDenied") if "shard-00000.json" in path else None
    with pytest.raises(StoreError):
        ShardRecord.read(folder.record_path(0))
    with pytest.raises(UserError, match="cannot be written"):
        folder.finish_shard(0, TABLE, STATS)
    server.fault = lambda method, path: None
    assert folder.is_complete(0)


def stored(path: StorePath, below: str = "") -> dict[str, bytes]:
    """All objects, as :func:`tests.data.folders.contents` has files."""
    found: dict[str, bytes] = {}
    for name, info in path.store.listing(path.key).items():
        if info is None:
            found |= stored(path / name, f"{below}{name}/")
        else:
            found[f"{below}{name}"] = (path / name).read_bytes()
    return found


def test_one_attempt_s_data_is_published(store, tmp_path):
    """The other finds its own not there, and removes what it has written."""
    for content in (b"first", b"second"):
        (tmp_path / content.decode()).write_bytes(content)
    assert publish(tmp_path / "first", store / "data")
    assert not publish(tmp_path / "second", store / "data")
    assert (store / "data").read_bytes() == b"first"


def test_a_store_without_conditional_writes_is_refused(store, server):
    server.ignores_conditions = True
    with pytest.raises(UserError, match="use a server that has conditional writes"):
        check_output(store)


@pytest.mark.parametrize("step", ["publish_stats", "publish_record"])
def test_a_crash_after_the_data_is_completed_from_the_attempt(store, monkeypatch, step):
    folder = open_(store)
    with monkeypatch.context() as patched:
        patched.setattr(Attempt, step, crash)
        with pytest.raises(Crash):
            folder.finish_shard(0, TABLE, STATS, TRACE)
    assert not folder.is_complete(0)
    assert open_(store).is_complete(0)
    assert sorted(stored(store)) == [
        "config.yaml", "manifest.json", "shards/shard-00000.arrow", "shards/shard-00000.json",
        "stats/shard-00000.json", "stats/shard-00000.trace.arrow",
    ]  # fmt: skip


def test_rows_of_an_unfinished_shard_are_kept_here_and_on_the_store(store, tmp_path):
    """A replica on the same machine has the log; one on another has the copy."""
    folder = open_(store)
    log = folder.parts(0, 1)
    log.append(row_result(0))
    log.keep()
    log.append(row_result(1))
    log.close()
    with folder.parts(0, 2) as here:
        assert set(here.results) == {(0, 0), (1, 0)}
        here.append(row_result(2))
        assert set(folder.parts(0, 3).results) == {(0, 0), (1, 0), (2, 0)}
    elsewhere = open_(storage_path(str(store), cache_dir=str(tmp_path / "other machine")))
    with elsewhere.parts(0, 4) as there:
        assert set(there.results) == {(0, 0)}
        assert len(elsewhere.part_logs(0)[0]) == 1
    open_(store, overwrite=True)
    assert folder.part_logs(0)[0] == []


def test_replicas_that_try_out_a_new_folder_are_not_in_each_other_s_way(store, monkeypatch):
    """The object with which one does so is there when another opens the run, for ever if one was killed."""
    monkeypatch.setattr(store.store, "remove", lambda key: None)
    check_output(store / "run")
    assert list(store.store.listing((store / "run").key)) != []
    assert not open_(store / "run").is_complete(0)
    (store / "other" / "specdist-probes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is not empty .* it contains specdist-probes\.txt"):
        open_(store / "other")


def test_a_complete_run_leaves_nothing_of_replicas_that_were_killed(store, tmp_path):
    """Part logs, here and on the store, data in the cache directory, and parts of an upload; what is another
    run's stays."""
    folder, other = open_(store / "run"), store / "other"
    folder.parts(0, 1).close()
    late = folder.parts_path(0, 2)
    late.write_text("a copy that arrived when the shard was complete")
    Attempt(folder.paths(0), "killed")._write_table(folder.data_path(0), TABLE)
    files = store.store._filesystem
    for path in (folder.data_path(0), other):
        files.call_s3("create_multipart_upload", Bucket="bucket", Key=path.key.partition("/")[2])
    assert [path for path in store.cache_dir.rglob("*") if path.is_file()] != []
    remove_leftovers(folder)
    assert [path for path in store.cache_dir.rglob("*") if path.is_file()] == []
    left = [upload["Key"] for upload in files.list_multipart_uploads("bucket")]
    assert left == [other.key.partition("/")[2]]
    assert not late.exists()


def test_a_run_begun_anew_keeps_its_rows_when_a_replica_of_the_old_one_ends(store):
    old, new = (replace(MANIFEST, info={RUN_TAG: name}) for name in ("old", "new"))
    folder = open_(store, manifest=old)
    open_(store, manifest=new, overwrite=True).parts_path(0, 1).write_text("rows")
    remove_leftovers(folder)
    assert (store / "parts").names() != []


def test_a_copy_of_a_log_that_comes_too_late_is_removed(store, tmp_path):
    """That of a replica on another machine, which was paused while the shard was completed."""
    folder = open_(store)
    paused = open_(storage_path(str(store), cache_dir=str(tmp_path / "other machine"))).parts(0, 1)
    paused.append(row_result(0))
    folder.finish_shard(0, TABLE, STATS)
    paused.keep()
    assert not (store / "parts").names()


def test_prompts_are_fetched_once(store, server, tmp_path):
    for name, rows in (("a.jsonl", '{"prompt": "one"}\n'), ("b.jsonl", '{"prompt": "two"}\n')):
        (store / "prompts" / name).write_bytes(rows.encode())
    (store / "prompts" / "README.md").write_bytes(b"#")
    options = {
        "prompt_column": "prompt", "messages_column": None, "limit": None,
        "cache_dir": str(tmp_path / "cache"),
    }  # fmt: skip
    found = open_prompts(f"{store}/prompts", **options)
    assert [found.prompt(row) for row in range(found.num_rows)] == ["one", "two"]
    server.fault = lambda method, path: Failure() if method == "GET" and "jsonl" in path else None
    store.store.retry_s = 0.0
    again = open_prompts(f"{store}/prompts", **options)
    assert again.fingerprint == found.fingerprint
    server.fault = lambda method, path: None
    (store / "prompts" / "b.jsonl").write_bytes(b'{"prompt": "too"}\n')
    assert open_prompts(f"{store}/prompts", **options).fingerprint != found.fingerprint
    with pytest.raises(UserError, match="there is no such object"):
        open_prompts(f"{store}/nothing", **options)
    (store / "csv" / "a.csv").write_bytes(b"prompt\nthree\n")
    assert open_prompts(f"{store}/csv", **options).prompt(0) == "three"


def test_what_cannot_be_used_is_refused_with_a_remedy(store, server, monkeypatch):
    def refusal(path=store):
        with pytest.raises(UserError) as refused:
            check_output(path)
        return str(refused.value)

    check_output(store)
    assert store.names() == []
    monkeypatch.setattr("specdist.data.store.access.FIRST_RETRY_S", 0.0)
    server.fault = lambda method, path: Failure(403, "AccessDenied") if method == "PUT" else None
    assert "need the permission" in refusal()
    server.fault = lambda method, path: Failure(503, "SlowDown")
    assert "check the network" in refusal()
    server.fault = lambda method, path: None
    assert "create it, or correct the URL" in refusal(storage_path("s3://missing/x"))
    monkeypatch.setattr(ObjectStore, "create", lambda *_: True)
    assert "ignores the condition If-None-Match" in refusal()
    assert "--push_to_hub" in refusal(storage_path("hf://datasets/a/b"))
    assert "no conditional writes" in refusal(storage_path("memory://a/b"))
    with pytest.raises(UserError, match="is not a storage that fsspec knows"):
        storage_path("nowhere://a/b")
    with pytest.raises(UserError, match=r"pip install -e '\.\[gs\]'"):
        storage_path("gs://a/b")
    with pytest.raises(UserError, match="names no bucket"):
        storage_path("s3://")
