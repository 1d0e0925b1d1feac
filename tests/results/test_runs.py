"""A run folder read by ``specdist.load_run``: complete, unfinished, damaged, or not a run."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest

import specdist
from specdist.data.run.run_folder import RunFolder
from specdist.utils.errors import UserError
from tests.data.samples import row_result
from tests.finished_runs import NUM_ROWS, NUM_SAMPLES, manifest_with, shard_stats, write_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only to be read."""
    return write_run(tmp_path_factory.mktemp("runs") / "whole").path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "copy")


def test_a_complete_run_has_its_rows_in_input_order(whole: Path) -> None:
    run = specdist.load_run(str(whole))
    assert run.is_complete and run.exact and run.missing_shards == ()
    assert isinstance(run.dataset, datasets.Dataset)
    expected = [(row, sample) for row in range(NUM_ROWS) for sample in range(NUM_SAMPLES)]
    assert list(zip(run.dataset["row_id"], run.dataset["sample_index"], strict=True)) == expected
    assert run.dataset[5]["completion"] == "answer 2.1"
    assert run.dataset[5]["reference"] == "reference 2"
    assert run.manifest.fingerprint["num_samples"] == NUM_SAMPLES
    assert run.dataset is run.dataset, "it is opened once"


def test_statistics_are_the_sum_of_the_shards(whole: Path) -> None:
    run = specdist.load_run(whole)
    assert list(run.shards) == [0, 1, 2] and len(run.shards) == 3
    assert run.shards[2] == shard_stats(2)
    assert 3 not in run.shards
    assert run.stats.num_rows == 6 and run.stats.num_target_passes == 15
    found = run.statistics
    assert (found["output"], found["exact"], found["complete"]) == (str(whole), True, True)
    assert found["tokens_per_s"] == 5 and found["tokens_per_s_per_device"] == 5 / 3
    assert found == json.loads(json.dumps(found))


def test_an_unfinished_run_says_what_is_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_run(tmp_path / "run", (0, 2)).path
    with caplog.at_level(logging.WARNING):
        run = specdist.load_run(path)
    assert "not complete: 1 of 3 shards are missing (1); unless it is at work" in caplog.text
    assert not run.is_complete and run.missing_shards == (1,)
    assert sorted(set(run.dataset["row_id"])) == [0, 1, 2, 6]
    assert run.statistics["complete"] is False
    assert run.stats.num_completion_tokens == 20

    write_run(path, (1,))
    assert run.stats.num_completion_tokens == 20, "a Run is what the folder was when it was loaded"
    assert specdist.load_run(path).is_complete


def test_a_run_without_a_finished_shard_has_no_rows_to_read(tmp_path: Path) -> None:
    run = specdist.load_run(write_run(tmp_path / "run", ()).path)
    assert run.missing_shards == (0, 1, 2) and dict(run.shards) == {}
    assert run.statistics["tokens_per_s"] is None
    with pytest.raises(UserError, match=r"no finished shard to read yet: .* jobs/status.py"):
        _ = run.dataset


def log_rows(folder: RunFolder, shard: int, rows: list[tuple[int, int]], generation: int = 0) -> None:
    """Write the part log of a replica that has finished these rows; ``generation`` is that of its lease."""
    with folder.parts(shard, generation) as log:
        for row, sample in rows:
            log.append(row_result(row, sample))


def test_rows_of_unfinished_shards_are_read_on_request(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", (0, 2))
    log_rows(folder, 1, [(4, 0), (3, 1)])
    log_rows(folder, 1, [(4, 0), (3, 0)], generation=1)
    plain, run = specdist.load_run(folder.path), specdist.load_run(folder.path, include_parts=True)
    assert len(plain.dataset) == 8 and plain.parts == {}
    rows = run.dataset
    assert list(zip(rows["row_id"], rows["sample_index"], strict=True)) == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (6, 0), (6, 1)
    ]  # fmt: skip
    assert (rows[8]["completion"], rows[8]["reference"]) == ("answer 4.0", None)
    assert rows[8]["mean_acceptance_length"] == 1.5 and rows[0]["reference"] == "reference 0"
    assert rows.features == plain.dataset.features
    assert rows._fingerprint != plain.dataset._fingerprint
    # Those of finished shards only.
    assert run.statistics == plain.statistics and run.missing_shards == (1,)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    """A bit in the middle: Arrow does not see it."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def wipe(path: Path) -> None:
    """As large as before."""
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("harm", [truncate, wipe, Path.unlink])
def test_a_damaged_shard_is_refused_and_named(copy: Path, harm: Any) -> None:
    harm(copy / "shards" / "shard-00001.arrow")
    with pytest.raises(
        UserError, match=r"shard-00001.arrow is missing, damaged, or has changed since .* delete .*"
    ):
        _ = specdist.load_run(copy).dataset


def test_a_flipped_bit_is_found_by_the_digest(copy: Path) -> None:
    specdist.load_run(copy, verify=True)
    flip(copy / "shards" / "shard-00002.arrow")
    assert len(specdist.load_run(copy).dataset) == NUM_ROWS * NUM_SAMPLES
    with pytest.raises(UserError, match=r"shard-00002.arrow is missing, damaged, or has changed since"):
        specdist.load_run(copy, verify=True)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere is not the folder of a run: it has no manifest.json"):
        specdist.load_run(tmp_path / "nowhere")
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=r"manifest.json is not a readable manifest of a run"):
        specdist.load_run(tmp_path)
    manifest_with(kind="acceptance").write(tmp_path / "manifest.json")
    with pytest.raises(UserError, match=r"of jobs/collect.py, the run is responses/ in it"):
        specdist.load_run(tmp_path)
