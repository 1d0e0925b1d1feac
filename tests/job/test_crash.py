"""SIGKILL at many moments: relaunching the same command ends with the files of an undisturbed run."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdist.data.columns import OUTPUT_COLUMNS
from specdist.data.run.parts import PartLog
from specdist.data.stats.rows import RowResult
from tests.job.gate import Gate
from tests.job.given_costs import generate_with_long_passes, generate_with_short_passes
from tests.job.killing import fork_and_kill
from tests.job.launching import (
    Ended,
    logged_rows,
    read_output,
    run_here,
    shard_bytes,
    shard_files,
    shard_stats,
)
from tests.job.ranks import fork_ranks, started_ranks

NUM_SHARDS = 4
MARK = "kept from the part log"


def num_logged(output: Path, shard: int) -> int:
    return logged_rows(output, shard).count(b"\n")


def is_finished(output: Path, shard: int) -> bool:
    return (output / "shards" / f"shard-{shard:05d}.json").exists()


class Progress:
    """What a run folder holds may only grow from one crash to the next."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._modified: dict[Path, int] = {}
        self._logs = [b""] * NUM_SHARDS

    def check(self) -> None:
        """Finished shards are the same files, and part logs go on where they were."""
        modified = {
            path: path.stat().st_mtime_ns
            for path in shard_files(self._output)
            if is_finished(self._output, int(path.stem[-5:]))
        }
        assert self._modified.items() <= modified.items(), "a finished shard was written again"
        self._modified = modified
        for shard in range(NUM_SHARDS):
            if not is_finished(self._output, shard):
                rows = logged_rows(self._output, shard)
                assert rows.startswith(self._logs[shard]), "rows of a part log were lost"
                self._logs[shard] = rows


def test_a_process_killed_at_every_stage_ends_with_the_same_files(
    slow: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    """A crash costs no finished row and changes no byte: before the first row, and in a shard. What a crash
    leaves between the files of a shard is the matter of tests/data/test_publishing.py."""
    options, undisturbed = slow
    output = tmp_path / "run"
    moments: list[Callable[[], bool]] = [
        lambda: (output / "manifest.json").exists(),
        lambda: num_logged(output, 1) >= 3,
    ]
    progress = Progress(output)
    for number, moment in enumerate(moments):
        gate = Gate(tmp_path / f"gate-{number}")
        assert fork_and_kill(moment, gate=gate, **options, output=output) == -signal.SIGKILL
        progress.check()
        if number == 0:
            assert num_logged(output, 0) == 0, "too late for a kill before the first row"
        assert not is_finished(output, NUM_SHARDS - 1), "too late: the run was over"
    assert run_here(**options, output=output).totals["num_rows"] == 24
    progress.check()
    assert shard_bytes(output) == shard_bytes(undisturbed)


@pytest.mark.ranks
def test_killed_ranks_that_draft_ahead_end_with_the_same_files(
    slow: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    """Rank 0 alone writes, and no other rank's state is needed. How far the draft works ahead decides where
    blocks end: it is frozen, not measured again."""
    options = slow[0] | {"overlap": "asynchronous", "num_branches": 2}
    output, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    progress, gate = Progress(output), Gate(tmp_path / "gate")
    with started_ranks(2, generate_with_long_passes, gate, **options, output=output) as ranks:
        gate.let_through(lambda: is_finished(output, 0) and num_logged(output, 1) >= 2, ranks.is_running)
        assert ranks.is_running(), "the job ended before it could be killed"
    progress.check()
    assert is_finished(output, 0) and not is_finished(output, 1)
    relaunched = generate_with_short_passes
    assert fork_ranks(2, relaunched, **options, output=output).totals["num_rows"] == 24
    progress.check()
    assert sum(shard["num_ahead_hits"] for shard in shard_stats(output)) > 0
    assert sum(shard["num_branch_hits"] for shard in shard_stats(output)) > 0
    # Its own measured times would make it another run; a folder without rows keeps its manifest.
    undisturbed.mkdir()
    shutil.copy(output / "manifest.json", undisturbed)
    assert fork_ranks(2, relaunched, **options, output=undisturbed).totals["num_rows"] == 24
    assert shard_bytes(output) == shard_bytes(undisturbed)


def unfinish(output: Path, shard: int, num_kept: int) -> None:
    """Turn a finished shard back into one whose first rows are in a part log, marked, after a torn
    line."""
    rows = read_output(output).to_pylist()[10 * shard :][:num_kept]
    names = RowResult.__dataclass_fields__.keys() & OUTPUT_COLUMNS.keys()
    log_path = output / "parts" / f"shard-{shard:05d}.jsonl"
    with PartLog(log_path) as log:
        for row in rows:
            log.append(RowResult(**{name: row[name] for name in names} | {"completion": MARK}))
    with log_path.open("ab") as file:
        file.write(b'{"crc32":"01')
    for name in ("shards/shard-{:05d}.arrow", "shards/shard-{:05d}.json", "stats/shard-{:05d}.json"):
        (output / name.format(shard)).unlink()


def test_rows_of_a_part_log_are_kept_and_only_the_others_generated(
    options: dict[str, Any], greedy: tuple[Path, Ended], tmp_path: Path
) -> None:
    """Rows generated again would be the same text, so only a mark shows that the log's are used."""
    output = tmp_path / "run"
    shutil.copytree(greedy[0], output)
    expected = read_output(output).to_pylist()
    untouched = output / "shards" / "shard-00000.arrow"
    modified = untouched.stat().st_mtime_ns
    unfinish(output, 2, num_kept=4)
    unfinish(output, 1, num_kept=6)
    assert run_here(**options, output=output).totals["num_completions"] == 24
    rows = read_output(output).to_pylist()
    kept = [*range(10, 16), *range(20, 24)]
    assert [row["row_id"] for row in rows if row["completion"] == MARK] == kept
    for row_id in kept:
        expected[row_id]["completion"] = MARK
    assert rows == expected
    assert untouched.stat().st_mtime_ns == modified
    # The work of this run is that of the four rows that no log had, and none for the last shard.
    stats = shard_stats(output)
    assert stats[1]["num_draft_tokens"] == sum(row["num_draft_tokens"] for row in rows[16:20])
    assert stats[2]["num_target_passes"] == 0
