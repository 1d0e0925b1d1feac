from __future__ import annotations

import errno
import os
import random
import threading

import pytest

from specdist.data.run.parts import SYNC_INTERVAL_S, PartLog
from specdist.utils.errors import UserError
from tests.data.samples import STRANGE_TEXT, random_text, row_result


def read(path):
    with PartLog(path) as log:
        return list(log.results.values()), log.stats


def write(path, results, stats=None):
    with PartLog(path) as log:
        for result in results:
            log.append(result)
        if stats is not None:
            log.snapshot(stats)


def test_rows_are_read_back_in_the_order_of_appending(tmp_path):
    rng = random.Random(0)
    texts = STRANGE_TEXT + [random_text(rng) for _ in range(200)]
    results = [row_result(row, row % 3, completion=text) for row, text in enumerate(texts)]
    rng.shuffle(results)
    path = tmp_path / "log"
    assert read(path) == ([], None)
    write(path, results, {"num_drafts": 1})
    write(path, [], {"num_drafts": 2, "text": "é\n"})
    assert read(path) == (results, {"num_drafts": 2, "text": "é\n"})


def test_the_first_of_two_results_for_a_sample_wins(tmp_path):
    path = tmp_path / "log"
    first, second = row_result(3, 1, completion="first"), row_result(3, 1, completion="second")
    write(path, [first, second])
    assert read(path) == ([first], None)
    write(path, [second])
    assert read(path) == ([first], None)
    # Two writers, as after a network partition, can both leave theirs in the file.
    write(tmp_path / "other", [second])
    path.write_bytes(path.read_bytes() + (tmp_path / "other").read_bytes())
    assert read(path) == ([first], None)


def test_a_last_line_torn_at_any_byte_costs_that_row_alone(tmp_path):
    path = tmp_path / "log"
    kept, torn, next_ = row_result(0), row_result(1, completion="é\ud83d"), row_result(2)
    write(path, [kept], {"step": 1})
    num_kept_bytes = path.stat().st_size
    write(path, [torn])
    whole = path.read_bytes()
    for size in range(num_kept_bytes, len(whole)):
        path.write_bytes(whole[:size])
        assert read(path) == ([kept], {"step": 1}), size
        assert path.stat().st_size == num_kept_bytes
        path.write_bytes(whole[:size])
        write(path, [next_])
        assert read(path) == ([kept, next_], {"step": 1}), size


def test_a_flipped_bit_anywhere_is_detected(tmp_path):
    path = tmp_path / "log"
    results = [row_result(row) for row in range(4)]
    write(path, results)
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    rng = random.Random(0)
    for _ in range(300):
        position = rng.randrange(len(whole))
        damaged = bytearray(whole)
        damaged[position] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        num_before = sum(end <= position for end in ends)
        assert read(path)[0] == results[:num_before], position


@pytest.mark.parametrize("garbage", [b"\0" * 5000, b"{}\n"])
def test_the_torn_end_that_a_power_loss_leaves_is_cut_off(tmp_path, garbage):
    path = tmp_path / "log"
    write(path, [row_result(0)])
    path.write_bytes(path.read_bytes() + garbage)
    write(path, [row_result(1)])
    assert read(path) == ([row_result(0), row_result(1)], None)


def test_appending_syncs_at_most_once_a_second(tmp_path, monkeypatch):
    now, synced_at = 0.0, []
    with PartLog(tmp_path / "log", clock=lambda: now) as log:
        monkeypatch.setattr(os, "fsync", lambda descriptor: synced_at.append(now))
        for row in range(40):
            log.append(row_result(row))
            log._end_sync()
            now += 0.125
        assert synced_at == [1.0, 2.0, 3.0, 4.0]
        log.sync()
        assert synced_at[-1] == 5.0


def test_nobody_waits_for_the_disk_but_at_the_end(tmp_path, monkeypatch):
    """A sync that takes for ever holds up no row; one that fails is told by the next call."""
    now, may_end, num_syncs = 0.0, threading.Event(), 0

    def fsync(_descriptor):
        nonlocal num_syncs
        num_syncs += 1
        assert may_end.wait(10)
        raise OSError(errno.EIO, "input/output error")

    log = PartLog(tmp_path / "log", clock=lambda: now)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        for row in range(4):
            now += SYNC_INTERVAL_S
            log.append(row_result(row))
        may_end.set()
        with pytest.raises(UserError, match="input/output error"):
            log.sync()
        assert num_syncs == 1
        # Told once; the file is there.
        now += SYNC_INTERVAL_S
        log.append(row_result(4))
        with pytest.raises(UserError, match="input/output error"):
            log.close()
    assert len(read(tmp_path / "log")[0]) == 5 and log._file.closed


def test_rows_of_another_shard_are_ignored(tmp_path):
    """As in a log that was renamed or copied over another."""
    path = tmp_path / "log"
    write(path, [row_result(row) for row in (1, 2, 3)])
    with PartLog(path, rows=range(2, 4)) as log:
        assert list(log.results) == [(2, 0), (3, 0)]
