"""Uploads beside the generation."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from specdist.data.run.run_folder import RunFolder
from specdist.job.recording.uploads import MAX_UPLOADS, Uploads
from tests.job.killing import wait_until
from tests.job.launching import logged_rows, run_here


def test_generation_goes_on_while_a_shard_is_uploaded() -> None:
    """And waits when too many shards are in memory."""
    may_end, ended = threading.Event(), []
    uploads = Uploads()
    for number in range(MAX_UPLOADS):
        uploads.start(lambda: may_end.wait(10), lambda won, number=number: ended.append((number, won)))
    uploads.settle()
    assert ended == [] and len(uploads) == MAX_UPLOADS
    threading.Timer(0.2, may_end.set).start()
    uploads.start(lambda: False, lambda won: ended.append((MAX_UPLOADS, won)))
    assert ended[0] == (0, True)
    uploads.close()
    assert ended == [*((number, True) for number in range(MAX_UPLOADS)), (MAX_UPLOADS, False)]


def test_the_end_of_a_shard_holds_up_nothing_but_the_end_of_the_run(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease and its part log are kept until its files are there, and the run's end waits for no other
    replica's."""
    output, finish = tmp_path / "run", RunFolder.finish_shard
    kept: list[tuple[int, int]] = []

    def slow(*given: Any, **named: Any) -> bool:
        """The first until both rows are recorded, which run one after the other."""
        if not kept:
            wait_until(lambda: all(logged_rows(output, shard) for shard in range(2)))
        else:
            time.sleep(0.3)
        kept.append((len(list(output.glob("leases/shard-*"))), len(list(output.glob("parts/*")))))
        return finish(*given, **named)

    monkeypatch.setattr(RunFolder, "finish_shard", slow)
    changes = {"limit": 2, "rows_per_shard": 1, "max_new_tokens": 4, "max_num_seqs": 1}
    ended = run_here(**(options | changes), output=output)
    assert ended.totals["complete"] is True and "waiting" not in ended.stderr
    assert kept[0] == (2, 2)
    assert not list(output.glob("leases/shard-*")) and not list(output.glob("parts/*"))
