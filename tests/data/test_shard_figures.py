"""What is known of many finished shards without opening their files: the same as their files say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import specdist
from specdist.data.run.layout import FIGURES, SHARDS_PER_FOLDER, TOTAL
from specdist.data.run.manifest import Manifest
from specdist.data.run.opening import open_run_folder
from specdist.data.run.publishing import ShardRecord
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats import figures
from specdist.data.stats.figures import FROM_STATS, ShardFigures, figures_among
from specdist.data.stats.rows import shard_table
from specdist.data.stats.shard import Stats
from specdist.job.totals import totals
from specdist.job.totals.totals import total_and_figures, write_total
from specdist.utils.errors import UserError
from tests.data.folders import INPUTS, Crash, crash, open_
from tests.data.samples import row_result
from tests.scale.counting import READS, CountingFiles
from tests.scale.requests import REQUESTS, counting_folder

NUM_SHARDS, PER_FOLDER = 8, 3
MANIFEST = Manifest(
    fingerprint={"num_rows": NUM_SHARDS, "rows_per_shard": 1, "num_samples": 1},
    info={SHARDS_PER_FOLDER: PER_FOLDER, "exact": True, "world_size": 1},
)


@pytest.fixture(autouse=True)
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of three shards are listed, as those of a thousand are."""
    monkeypatch.setattr(figures, "FEWEST_LISTED", 2)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Two folders of three shards are complete, and the first of two shards in the third."""
    folder = open_(tmp_path / "run", manifest=MANIFEST)
    for shard in range(7):
        finish(folder, shard)
    return folder


def stats_of(shard: int) -> Stats:
    """No two figures are the same."""
    found = Stats(num_error_rows=shard % 2, wall_ns=shard + 1)
    for place, name in enumerate(figures.COUNTS[2:-1]):
        setattr(found, name, 100 * place + shard)
    found.target_ns.verify, found.draft_ns.draft = 2000 + shard, 3000 + shard
    found.work_span.extend(4000 + shard, 5000 + shard)
    return found


def finish(folder: RunFolder, shard: int, text: str = "answer") -> None:
    table = shard_table(
        INPUTS.slice(0, 1), [row_result(shard, completion=text)], first_row=shard, num_samples=1
    )
    stats = stats_of(shard).to_json() | {"replica": f"replica-{shard % 3}"}
    assert folder.finish_shard(shard, table, stats)
    write_total(folder, shard, NUM_SHARDS)


def as_rows(found: ShardFigures) -> list[dict[str, object]]:
    """By shard, with the names of replicas."""
    return [
        {name: int(found[name][place]) for name in figures.INTEGERS if name != figures.REPLICA}
        | {"replica": found.replica_of(place), "sha256": found.digests[place]}
        for place in range(len(found))
    ]


def test_the_figures_are_those_of_the_shards_own_files(folder: RunFolder) -> None:
    assert folder.groups_with(FIGURES) == {"00000", "00001"}
    found = total_and_figures(folder, range(7))[1]
    for place, row in enumerate(as_rows(found)):
        record = ShardRecord.read(folder.record_path(place))
        assert record is not None and found.records[place] == record
        expected = {name: get(stats_of(place)) for name, get in FROM_STATS.items()}
        assert {name: row[name] for name in FROM_STATS} == expected
        assert (row["shard"], row["replica"]) == (place, f"replica-{place % 3}")
    assert len(found) == 7 and len(found.replicas) == 3


def test_a_shard_is_read_once_and_only_if_no_file_of_figures_has_it(folder: RunFolder) -> None:
    total, found = total_and_figures(folder, range(7))
    for shard in range(6):
        folder.stats_path(shard).unlink()
    again, same = total_and_figures(folder, range(7))
    assert as_rows(same) == as_rows(found) and again.stats == total.stats
    folder.stats_path(6).unlink()
    with pytest.raises(UserError, match=r"shard-00006.json is damaged"):
        total_and_figures(folder, range(7))
    some = figures_among(folder, [3, 5])
    assert some.shards.tolist() == [3, 5] and sorted(some.replicas) == ["replica-0", "replica-2"]


@pytest.mark.parametrize("harm", [b"", b"{}", b"[]", None])
def test_damaged_figures_are_no_loss(folder: RunFolder, harm: bytes | None) -> None:
    total, found = total_and_figures(folder, range(7))
    path = folder.sum_path(FIGURES, "00001")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"2004", b"2005") if harm is None else harm)
    assert len(ShardFigures.read(path)) == 0
    again, same = total_and_figures(folder, range(7))
    assert as_rows(same) == as_rows(found) and again.stats == total.stats
    # What they would have said is still compared with its checksum.
    folder.stats_path(4).write_bytes(folder.stats_path(4).read_bytes().replace(b"2004", b"2005"))
    with pytest.raises(UserError, match=r"shard-00004.json is damaged .*checksum.*delete it, and start"):
        total_and_figures(folder, range(7))


def test_figures_written_after_a_subtotal_add_what_is_new(tmp_path: Path) -> None:
    """As a folder's shards are finished, in any order, with a subtotal of the first."""
    manifest = replace(MANIFEST, info={**MANIFEST.info, SHARDS_PER_FOLDER: 4})
    folder = open_(tmp_path / "run", manifest=manifest)
    for shard in (1, 0, 3):
        finish(folder, shard)
    assert figures_among(folder, [0, 1, 2, 3]).shards.tolist() == [0, 1]
    (stats,) = [folder.stats_path(0)]
    kept = stats.read_bytes()
    stats.unlink()
    finish(folder, 2)
    stats.write_bytes(kept)
    assert figures_among(folder, range(4)).shards.tolist() == [0, 1, 2, 3]
    for kind in (TOTAL, FIGURES):
        folder.sum_path(kind, "00000").unlink()
    _, own = total_and_figures(folder, range(4))
    finish(folder, 4)
    assert [row["wall_ns"] for row in as_rows(own)] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["record", "data", "stats"])
def test_a_shard_whose_file_is_gone_is_not_complete(folder: RunFolder, name: str) -> None:
    assert folder.complete_among(range(NUM_SHARDS)) == list(range(7))
    getattr(folder.paths(4), name).unlink()
    assert folder.complete_among(range(NUM_SHARDS)) == [0, 1, 2, 3, 5, 6]


def test_data_of_another_size_is_compared_with_its_own_record(folder: RunFolder) -> None:
    """Figures may be of data that was deleted and generated again since."""
    kept = folder.sum_path(FIGURES, "00001").read_bytes()
    for path in folder.paths(4).needed:
        path.unlink()
    finish(folder, 4, text="a longer answer than before")
    folder.sum_path(FIGURES, "00001").write_bytes(kept)
    record = ShardRecord.read(folder.record_path(4))
    assert (
        record is not None
        and record.num_bytes != ShardFigures.read(folder.sum_path(FIGURES, "00001"))["num_bytes"][1]
    )
    assert folder.complete_among(range(NUM_SHARDS)) == list(range(7))
    folder.data_path(4).write_bytes(b"damaged")
    assert folder.complete_among(range(NUM_SHARDS)) == [0, 1, 2, 3, 5, 6]
    with pytest.raises(UserError, match=r"shard-00004.arrow is missing, damaged, or has changed"):
        specdist.load_run(folder.path)


def test_a_crash_between_the_figures_and_the_total_loses_nothing(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    total, found = total_and_figures(folder, range(7))
    folder.sum_path(TOTAL, "00001").unlink()
    folder.sum_path(FIGURES, "00001").unlink()
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(totals, "write_json", crash)
        write_total(folder, 5, NUM_SHARDS)
    assert folder.groups_with(TOTAL) == {"00000"} and folder.groups_with(FIGURES) == {"00000", "00001"}
    again, same = total_and_figures(folder, range(7))
    assert as_rows(same) == as_rows(found) and again.stats == total.stats
    write_total(folder, 5, NUM_SHARDS)
    assert folder.groups_with(TOTAL) == {"00000", "00001"}


def test_a_restart_forgets_the_figures_of_folders_that_are_not_whole(folder: RunFolder) -> None:
    folder.data_path(4).unlink()
    again = open_(folder.path, manifest=MANIFEST)
    assert again.groups_with(FIGURES) == {"00000"}
    finish(again, 4, text="another")
    assert again.groups_with(FIGURES) == {"00000", "00001"}
    assert figures_among(again, range(6)).records[4] == ShardRecord.read(again.record_path(4))


def test_finished_shards_are_not_opened_one_by_one(folder: RunFolder) -> None:
    """Of seven shards six are in files of figures: their records and statistics are not read."""
    counting = CountingFiles(str(folder.path))
    reads = []
    for _ in ("with figures", "without"):
        counting.counts.clear()
        with counting.patched():
            assert specdist.load_run(folder.path).finished_shards == tuple(range(7))
        loading = counting.counts[READS]
        with counting.patched():
            total_and_figures(folder, range(7))
        reads.append((loading, counting.counts[READS] - loading))
        for group in folder.groups_with(FIGURES):
            folder.sum_path(FIGURES, group).unlink()
    # Without them six records, then six records and statistics; with them two files each time.
    assert [without - with_ for with_, without in zip(*reads, strict=True)] == [6 - 2, 12 - 2]


def test_on_a_store_listings_tell_which_shards_are_complete(tmp_path: Path) -> None:
    store, path = counting_folder(tmp_path)
    folder = open_run_folder(path, MANIFEST, "seed: 1\n", overwrite=False)
    for shard in range(7):
        finish(folder, shard)
    requests = []
    for _ in ("with figures", "without"):
        store.counts.clear()
        assert folder.complete_among(range(NUM_SHARDS)) == list(range(7))
        requests.append(store.counts[REQUESTS])
        for group in folder.groups_with(FIGURES):
            folder.sum_path(FIGURES, group).unlink()
    # Six shards have a record, data and statistics to be asked for.
    assert requests[1] - requests[0] >= 6 * 3 - 2 * 4


def test_parts_are_joined_in_the_order_of_their_shards(folder: RunFolder) -> None:
    found = total_and_figures(folder, range(7))[1]
    parts = [found.among([1, 4]), found.among([5, 0, 6]), found.among([]), found.among([3, 2])]
    assert as_rows(ShardFigures.joined(parts)) == as_rows(found)
    assert ShardFigures.joined([]).shards.dtype == np.int64
