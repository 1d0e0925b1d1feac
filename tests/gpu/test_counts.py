"""The counts of what a device is given: their command, and that no number is worse than it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from specdist.lab.plan.roofline import DRAFT_PASS, TARGET_PASS
from tests.forked import started_world
from tests.gpu.counts import COUNTED, main, planned
from tests.gpu.operators import operator_of
from tests.gpu.processes import needs_fake_device, on_device
from tests.ranks import REPOSITORY

TIMEOUT_S = 500
# Counted when the command was written; whoever needs fewer lowers them.
MOST_KERNELS_PER_LAYER = 16
MOST_SYNCS = {"target": 2, "draft": 2}
# Where a sequence ends, a block is shorter than a recorded run.
MOST_LAUNCHES_OF_RUN = 1.2
LEAST_SHARE = 0.95
MOST_OVER_FLOOR = {"step": 1.1, "block": 1.22}


@pytest.fixture(scope="module")
def found() -> Any:
    with started_world(1, main, ["--fast"], environment={"OMP_NUM_THREADS": "1"}) as world:
        assert world.end(TIMEOUT_S) == 0, world.words("stderr")
        return json.loads(world.words("stdout")[0].splitlines()[-1])


@needs_fake_device
def test_the_last_line_has_what_is_counted_and_it_is_no_worse(found: Any) -> None:
    assert found["kernels_per_layer"]["llama"] <= MOST_KERNELS_PER_LAYER
    for side, most in MOST_SYNCS.items():
        for rule, policies in found["syncs_per_round"][side].items():
            assert policies["fixed"] <= most, (side, rule)
    for rule, policies in found["rounds"].items():
        assert policies["fixed"]["draft"]["replays"] <= MOST_LAUNCHES_OF_RUN, rule
        assert policies["fixed"]["draft"]["passes"] > 2 * MOST_LAUNCHES_OF_RUN, rule
    for policy, sizes in found["replay_share"].items():
        assert all(counts["share"] >= LEAST_SHARE for counts in sizes.values()), policy
    for kind, most_ratio in MOST_OVER_FLOOR.items():
        assert 1 <= found["bytes_over_floor"]["1B"][kind] <= most_ratio


@needs_fake_device
def test_the_planner_promises_nothing_that_the_engine_does_not_do(found: Any) -> None:
    """The numbers in its file are those of the engine, or worse."""
    for side, counts in planned(found).items():
        passes = {"target": TARGET_PASS, "draft": DRAFT_PASS}[side]
        for name in ("kernels_per_layer", "eager_kernels", "synchronisations", "copies"):
            assert getattr(passes, name) >= counts[name] - 0.01, (side, name)


def test_the_planners_numbers_are_those_of_the_file() -> None:
    """If not: python -m tests.gpu.counts --output jobs/benchmarks/device-counts.json"""
    after = json.loads(COUNTED.read_text(encoding="utf-8"))["after"]
    assert planned(after) == json.loads((REPOSITORY / "specdist/lab/plan/counted.json").read_text())


@needs_fake_device
def test_sides_and_bytes_of_work_that_is_known() -> None:
    on_device(_check_known_work)


def _check_known_work() -> None:
    from tests.gpu.counts import device
    from tests.gpu.observing import Observer
    from tests.gpu.traffic import moved_bytes

    weight = torch.nn.Linear(8, 4, bias=False, dtype=torch.bfloat16).to("cuda")
    tokens = torch.zeros(2, 8, dtype=torch.bfloat16, device="cuda")
    observer = Observer(weight, weighs=True)
    with observer.active():
        weight(tokens)
        torch.zeros(1).to("cuda")
    counts = observer.counts["target"]
    assert (counts["eager passes"], counts["eager kernels"], counts["synchronisations"]) == (1, 1, 1)
    assert counts["bytes of weights"] == 2 * 8 * 4
    # The number that comes from the host is written, too.
    assert counts["bytes of other tensors"] == 2 * (2 * 8 + 2 * 4) + 4
    # Lines of a table are read, not the table; lines are written to a cache, not the cache.
    table, lines = torch.zeros(1000, 4, device="cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")
    index_select = operator_of(torch.ops.aten.index_select.default)
    moved = moved_bytes(index_select, (table, 0, lines), {}, table[:3])
    assert moved.total() == 2 * 3 * 4 * 4 + 3 * 8
    index_copy = operator_of(torch.ops.aten.index_copy_.default)
    assert moved_bytes(index_copy, (table, 0, lines, table[:3]), {}, table).total() == moved.total()
    # A line that is repeated lies in memory once.
    add = operator_of(torch.ops.aten.add.Tensor)
    repeated = table[:1].expand(1000, 4)
    assert moved_bytes(add, (repeated, repeated), {}, table).total() == 2 * 16 + 1000 * 16
    assert device.DEVICE.counts().num_kernels > 0
