"""Every row of a run is there once, whoever is killed, paused or stopped; and the longest begin first."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pytest

from specdist.data.run.run_folder import RunFolder
from specdist.job.rows.lengths import MIN_LEARNED, ExpectedLengths
from tests.job.ending_simulation import TailOutcome, TailScenario, TailSimulation

SMALL = TailScenario()


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def run(folder: Path, scenario: TailScenario) -> tuple[TailOutcome, RunFolder]:
    """A run to its end."""
    simulation = TailSimulation(folder, scenario)
    outcome = simulation.run()
    return outcome, check(simulation)


def check(simulation: TailSimulation) -> RunFolder:
    """Each row of a complete run is there once, and nothing is left over."""
    scenario = simulation.scenario
    output = RunFolder(simulation.output)
    shards = range(scenario.num_shards)
    assert output.complete_shards() == list(shards), "the run did not come to its end"
    tables = [pa.ipc.open_file(str(output.data_path(shard))).read_all() for shard in shards]
    table = pa.concat_tables(tables)
    expected = [row for row in range(scenario.num_rows) for _ in range(scenario.num_samples)]
    assert table["row_id"].to_pylist() == expected
    assert table["completion"].to_pylist() == [f"of {row}" for row in expected]
    assert sum(output.read_stats(shard)["num_rows"] for shard in shards) == scenario.num_rows
    assert list((simulation.output / "parts").iterdir()) == []
    leases = {path.name.partition(".")[0] for path in (simulation.output / "leases").glob("s*-*.0*")}
    assert leases == set()
    return output


def test_replicas_generate_each_row_once_and_the_shards_of_one_alone(tmp_path: Path) -> None:
    outcome, shared = run(tmp_path / "shared", SMALL)
    assert outcome.num_repeated == 0
    _, alone = run(tmp_path / "alone", dataclasses.replace(SMALL, num_replicas=1))
    for shard in range(SMALL.num_shards):
        assert shared.data_path(shard).read_bytes() == alone.data_path(shard).read_bytes()


@pytest.mark.parametrize("seed", range(3))
def test_rows_survive_whatever_becomes_of_the_replicas(tmp_path: Path, seed: int) -> None:
    scenario = dataclasses.replace(SMALL, life_s=70, seed=seed, num_samples=1 + seed % 2, median_tokens=400)
    outcome, _ = run(tmp_path / "run", scenario)
    assert outcome.num_disturbed >= 2


def sizes(rows: list[int]) -> list[float]:
    """Long prompts at the end."""
    return [2.0**row for row in rows]


def test_rows_with_prompts_of_which_long_completions_are_known_begin_first() -> None:
    lengths = ExpectedLengths(sizes)
    rows = list(range(8))
    lengths.begin(rows)
    assert lengths.longest_first(rows) == rows
    # The middle prompts get the longest completions.
    for number in range(2 * MIN_LEARNED):
        lengths.begin([number % 8])
        lengths.observe(number % 8, 100 if number % 8 in (3, 4) else 10)
    lengths.end(rows)
    lengths.begin(rows)
    assert lengths.longest_first(rows) == [3, 4, 0, 1, 2, 5, 6, 7]


def test_finished_samples_tell_the_length_of_a_rows_others() -> None:
    lengths = ExpectedLengths(sizes)
    lengths.begin([0, 1, 2])
    lengths.observe(1, 50)
    lengths.observe(2, 70)
    assert lengths.longest_first([0, 1, 2]) == [2, 1, 0]
