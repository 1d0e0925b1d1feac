"""How large a run may be, and what a restart makes of what it finds in its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdist.data.run.manifest import MAX_SHARDS, ROWS_PER_SHARD, Manifest, ShardPlan
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.rows import shard_table
from specdist.data.stats.shard import Stats
from specdist.job.totals.totals import total_of
from specdist.utils.errors import UserError
from tests.data.folders import INPUTS, open_
from tests.data.samples import row_result

NUM_SHARDS = 8
MANIFEST = Manifest(fingerprint={"num_rows": NUM_SHARDS, "rows_per_shard": 1, "num_samples": 1})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of eight shards, all but the last two complete."""
    folder = open_(tmp_path, manifest=MANIFEST)
    for shard in range(NUM_SHARDS - 2):
        finish(folder, shard)
    return folder


def finish(folder: RunFolder, shard: int) -> None:
    results = [row_result(shard, num_completion_tokens=shard)]
    with folder.parts(shard) as log:
        log.append(results[0])
    table = shard_table(INPUTS.slice(0, 1), results, first_row=shard, num_samples=1)
    assert folder.finish_shard(shard, table, Stats(num_completion_tokens=shard).to_json())


def test_more_shards_than_a_folder_bears_are_refused_unless_their_size_is_left_open() -> None:
    message = (
        r"--rows_per_shard 512 splits 10000000 rows into 19532 shards, and a run has at most 1000: "
        r"raise it to 10000 or more, or split the rows into several runs"
    )
    with pytest.raises(UserError, match=message):
        ShardPlan.of(10_000_000, 512)
    assert ShardPlan.of(10_000_000, None).num_shards == MAX_SHARDS
    assert ShardPlan.of(10_000_001, None).rows_per_shard == 10_001
    assert ShardPlan.of(MAX_SHARDS * ROWS_PER_SHARD, None).rows_per_shard == ROWS_PER_SHARD
    assert ShardPlan.of(3, None) == ShardPlan(3, ROWS_PER_SHARD)
    assert ShardPlan.of(3000, 3).num_shards == MAX_SHARDS


def test_a_total_is_the_sum_of_its_shards(folder: RunFolder) -> None:
    assert total_of(folder, range(6)).stats.num_completion_tokens == 15
    assert total_of(folder, range(6)).num_rows == 6
    assert total_of(folder, [0, 1, 3, 4, 5]).stats.num_completion_tokens == 13
