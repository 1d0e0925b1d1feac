"""Uploads beside the generation."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from specdist.data.run.run_folder import RunFolder
from specdist.engine.request import Completion
from specdist.job.recording.uploads import MAX_UPLOADS, Uploads
from tests.lab.emulation.rows import RowSettings, open_rows


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its lease and its part log are kept until its files are there."""
    may_end, finish = threading.Event(), RunFolder.finish_shard

    def slow(*given: Any, **named: Any) -> bool:
        assert may_end.wait(10)
        return finish(*given, **named)

    monkeypatch.setattr(RunFolder, "finish_shard", slow)
    settings = RowSettings(
        num_rows=2, num_slots=1, prompt_tokens=3, output_tokens=2, vocab_size=8, rows_per_shard=1, seed=0
    )
    with open_rows(settings) as rows:
        recorder, folder = rows.recorder, rows.recorder._plan.folder
        requests = recorder.requests()
        for _ in range(2):
            request = next(requests)
            assert request is not None
            recorder.record(
                Completion(
                    request=request, token_ids=[1], text="1", finish_reason="stop", num_spec_steps=0,
                    num_draft_tokens=0, num_accepted_draft_tokens=0,
                )
            )  # fmt: skip
        assert recorder.num_uploads == 2 and not folder.recorded_shards()
        assert len(list(folder.leases_path.glob("shard-*"))) == 2
        assert len(list((folder.path / "parts").iterdir())) == 2
        may_end.set()
        recorder.settle()
        assert recorder.is_run_complete and folder.complete_shards() == [0, 1]
        assert not list(folder.leases_path.glob("shard-*"))
