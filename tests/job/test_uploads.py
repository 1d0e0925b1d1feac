"""Uploads beside the generation."""

from __future__ import annotations

import threading

import pytest

from specdist.job.uploads import MAX_UPLOADS, Uploads


def test_generation_goes_on_while_a_shard_is_uploaded() -> None:
    """And waits when too many shards are in memory."""
    may_end, ended = threading.Event(), []
    uploads = Uploads(is_beside=True)
    for number in range(MAX_UPLOADS):
        uploads.start(lambda: may_end.wait(30), lambda won, number=number: ended.append((number, won)))
    uploads.settle()
    assert ended == [] and len(uploads) == MAX_UPLOADS
    threading.Timer(0.2, may_end.set).start()
    uploads.start(lambda: False, lambda won: ended.append((MAX_UPLOADS, won)))
    assert ended[0] == (0, True)
    uploads.close()
    assert ended == [*((number, True) for number in range(MAX_UPLOADS)), (MAX_UPLOADS, False)]


def test_what_an_upload_raises_ends_the_job() -> None:
    uploads = Uploads(is_beside=True)
    with pytest.raises(ZeroDivisionError):
        uploads.start(lambda: 1 // 0 > 0, lambda won: pytest.fail("it has not ended well"))
        uploads.close()
    uploads.close()
    assert not uploads._pool._threads or not any(thread.is_alive() for thread in uploads._pool._threads)


def test_a_folder_has_its_files_at_once() -> None:
    ended: list[bool] = []
    Uploads(is_beside=False).start(lambda: True, ended.append)
    assert ended == [True]
