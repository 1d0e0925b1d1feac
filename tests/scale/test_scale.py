"""What replicas ask of the file server must not grow with their number."""

from __future__ import annotations

import random

import pytest

from tests.scale.simulation import PHASES, Scenario, Simulation, operations

MAX_METADATA_OPERATIONS, MAX_READS, MAX_REQUESTS = 5.0, 2.0, 6.0


@pytest.mark.parametrize(("num_replicas", "num_shards"), [(2, 6), (40, 120)])
def test_file_operations_of_a_replica_are_few_from_start_to_end(
    tmp_path, monkeypatch, num_replicas, num_shards
):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    random.seed(1)
    scenario = Scenario(num_replicas=num_replicas, num_shards=num_shards, vanishing=0.1)
    outcome = Simulation(tmp_path / "run", scenario).run()
    assert sorted(outcome.published_by) == list(range(num_shards))
    counted = operations(outcome)
    for phase in PHASES:
        assert outcome.replica_s[phase] > 0
        assert 0 < counted["metadata_ops_per_replica_s"][phase] < MAX_METADATA_OPERATIONS
        assert 0 < counted["reads_per_replica_s"][phase] < MAX_READS


def test_requests_of_a_replica_to_a_store_are_few(tmp_path):
    random.seed(1)
    scenario = Scenario(num_replicas=12, num_shards=36, vanishing=0.1, on_store=True)
    outcome = Simulation(tmp_path / "run", scenario).run()
    assert sorted(outcome.published_by) == list(range(36))
    counted = operations(outcome)["requests_per_replica_s"]
    assert all(0 < counted[phase] < MAX_REQUESTS for phase in PHASES), counted
