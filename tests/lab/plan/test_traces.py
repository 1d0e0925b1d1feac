"""The acceptance rate from the trace of a run."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pytest

from specdist.data.stats.traces import TracedToken, trace_table
from specdist.lab.plan.job import acceptance_of
from specdist.utils.errors import UserError


def token(*, is_verified: bool, is_accepted: bool) -> TracedToken:
    return TracedToken(1, 0, 0, 7, 0.5, 0.5, 0.5, 0.5 if is_verified else None, is_verified, is_accepted)


def write(path: Path, *tokens: TracedToken) -> Path:
    table = trace_table([(0, 0, tokens)])
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    return path


ACCEPTED = token(is_verified=True, is_accepted=True)
REJECTED = token(is_verified=True, is_accepted=False)
AFTER = token(is_verified=False, is_accepted=False)


def test_acceptance_is_that_of_the_verified_tokens_of_all_shards(tmp_path: Path) -> None:
    first = write(tmp_path / "stats/shard-00000.trace.arrow", ACCEPTED, REJECTED, AFTER, AFTER)
    write(tmp_path / "stats/shard-00001.trace.arrow", ACCEPTED, ACCEPTED)
    assert acceptance_of(tmp_path) == pytest.approx(3 / 4)
    assert acceptance_of(first) == pytest.approx(1 / 2)


def test_what_holds_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no stats"):
        acceptance_of(tmp_path)
    (tmp_path / "text").write_text("nothing")
    with pytest.raises(UserError, match=r"text is not a trace of jobs/generate\.py"):
        acceptance_of(tmp_path / "text")
    with pytest.raises(UserError, match="no verified token"):
        acceptance_of(write(tmp_path / "stats/shard-00000.trace.arrow", AFTER))
