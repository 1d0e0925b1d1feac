"""A replica in which no rank makes progress ends after --rank_timeout, and shows where it was."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from specdist.job.ranks.topology import Topology, local_device
from tests.job import standing, stepping
from tests.job.launching import Main
from tests.job.pair import Pair
from tests.job.ranks import fork_ranks, started_ranks

NUM_RANKS = 3
AT_A_TIME = 3
TIMEOUT_S = 5
# It takes the time-out and a few seconds; without an end it would take a day.
SOON_S = 100

pytestmark = pytest.mark.ranks


@dataclass(frozen=True)
class Outcome:
    """Exit codes and stderr of all ranks, each of which has come to its own end or was killed."""

    codes: list[int | None]
    words: list[str]


def ended(main: Main, options: dict[str, Any]) -> Outcome:
    with started_ranks(NUM_RANKS, main, **options) as world:
        deadline = time.monotonic() + SOON_S
        for process in world.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return Outcome([process.exitcode for process in world.processes], world.words("stderr"))


# Jobs that load nothing, and wait more than they work.
STILL: list[Main] = [
    standing.one_hangs,
    standing.one_is_slow,
    standing.one_does_not_leave,
    standing.one_hangs_at_its_end,
    standing.one_holds_its_interpreter,
    standing.all_hold_their_interpreters,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("still")


@pytest.fixture(scope="module")
def still(folder: Path, options: dict[str, Any]) -> Callable[[Main], Outcome]:
    """The outcome of each of them, and of a main job; so many run at a time."""
    given = {main: options_of(folder / main.__name__) for main in STILL}
    given[standing.one_cannot_read] = options | {
        "tp_size": 2, "rank_timeout": 2 * TIMEOUT_S, "output": folder / "reading"
    }  # fmt: skip
    pool = ThreadPoolExecutor(AT_A_TIME)
    found = {main: pool.submit(ended, main, own) for main, own in given.items()}
    return lambda main: found[main].result()


def options_of(output: Path) -> dict[str, Any]:
    return {
        "prompts": "none", "target": "none", "draft": "none-either", "device": "cpu", "tp_size": 2,
        "rank_timeout": TIMEOUT_S, "output": output,
    }  # fmt: skip


def stacks(words: str) -> Iterator[str]:
    """The functions in them, innermost first."""
    for line in words.splitlines():
        if line.startswith('  File "') and " in " in line:
            yield line.rpartition(" in ")[2]


def test_a_rank_that_hangs_while_it_loads_ends_its_replica(still: Callable[[Main], Outcome]) -> None:
    found = still(standing.one_hangs)
    assert found.codes == [1] * NUM_RANKS
    for rank, said in enumerate(found.words):
        assert "this replica ends: no rank has made progress for 5 s (--rank_timeout)" in said
        assert "s in: waiting until every rank has loaded; rank 1 (target 2/2) for" in said
        assert "rank 2 (draft) for" in said and "s in: loading the draft" in said
        assert ("hang" if rank == 2 else "barrier") in set(stacks(said))


def test_a_read_that_hangs_is_in_the_log_of_its_rank(still: Callable[[Main], Outcome], folder: Path) -> None:
    """The main job, which has logs in its folder by then; the others show where they wait."""
    found = still(standing.one_cannot_read)
    assert found.codes == [1] * NUM_RANKS, found.words
    logs = sorted((folder / "reading" / "logs").iterdir())
    for rank, log in enumerate(path.read_text() for path in logs):
        assert "this replica ends: no rank has made progress for 10 s" in log
        assert "rank 1 (target 2/2) for" in log and "s in: loading the target; rank 2" in log
        # The other target rank is already in the first pass, which needs them both.
        assert ("_run", "hang", "all_gather_object")[rank] in set(stacks(log))


def test_a_rank_that_is_slow_is_waited_for(still: Callable[[Main], Outcome]) -> None:
    """It takes longer than all ranks together may hang."""
    assert standing.STEP_S * standing.NUM_STEPS > 1.2 * TIMEOUT_S
    found = still(standing.one_is_slow)
    assert found.codes == [0] * NUM_RANKS, found.words
    assert not any("this replica ends" in said for said in found.words), found.words


@pytest.mark.parametrize(
    ("main", "missing", "told"),
    [
        (standing.one_never_comes, 1, "rank 1 (target 2/2) of 3 ranks did not arrive within 5 s"),
        # Without a launcher that has a store for them the others have no place to meet.
        (standing.the_first_never_comes, 0, "rank 0, which hosts the ranks' rendezvous store"),
    ],
)
def test_a_rank_that_does_not_arrive_is_named(main: Main, missing: int, told: str, tmp_path: Path) -> None:
    with started_ranks(NUM_RANKS, main, **options_of(tmp_path / "run")) as world:
        for rank in {0, 1, 2} - {missing}:
            world.processes[rank].join(SOON_S)
            assert world.processes[rank].exitcode == 1
            assert told in world.words("stderr")[rank]


def test_the_last_barrier_has_a_timeout(still: Callable[[Main], Outcome]) -> None:
    found = still(standing.one_does_not_leave)
    assert found.codes == [1] * NUM_RANKS
    for rank, said in enumerate(found.words):
        assert "rank 0 (target 1/2) for" in said and "s in: leaving; rank 1 (target 2/2) for" in said
        assert ("hang" if rank == 1 else "barrier") in set(stacks(said))


def test_a_rank_that_hangs_at_its_end_harms_no_other(still: Callable[[Main], Outcome]) -> None:
    found = still(standing.one_hangs_at_its_end)
    assert found.codes == [0, 1, 0]
    assert "hang" in set(stacks(found.words[1]))


def test_a_rank_whose_interpreter_is_held_shows_its_stacks_and_is_ended(
    still: Callable[[Main], Outcome],
) -> None:
    found = still(standing.one_holds_its_interpreter)
    assert found.codes == [1, -signal.SIGKILL, 1]
    for rank in (0, 2):
        said = found.words[rank]
        assert "this replica ends: rank 1 (target 2/2): process" in said
        assert "has been silent for 5 s (--rank_timeout), while loading the target" in said
    assert "hold_the_interpreter" in set(stacks(found.words[1]))


def test_ranks_whose_interpreters_are_all_held_end_themselves(still: Callable[[Main], Outcome]) -> None:
    found = still(standing.all_hold_their_interpreters)
    assert found.codes == [1] * NUM_RANKS
    assert all("hold_the_interpreter" in set(stacks(said)) for said in found.words)


def num_tensors(folder: Path) -> int:
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            total += len(file.keys())
    return total


def test_loading_and_measuring_are_counted_in_steps(
    options: dict[str, Any], pair: Pair, tmp_path: Path
) -> None:
    """On every rank: each tensor that is read, and each pass that is run, is one."""
    # A policy that needs measured costs.
    changes = {"policy": "goodput", "limit": 1, "max_new_tokens": 2, "max_num_seqs": 2}
    done = fork_ranks(2, stepping.main, **(options | changes), output=tmp_path / "run")
    assert done.code == 0, done.stderr
    steps = [stepping.steps_of(tmp_path / "run", rank) for rank in range(2)]
    assert steps[0]["loading the target"] > num_tensors(pair.target)
    assert steps[1]["loading the draft"] > num_tensors(pair.draft)
    for found in steps:
        assert sum(number for phase, number in found.items() if phase.startswith("measuring ")) > 10, found


@pytest.mark.parametrize("timeout_s", [1.0, math.inf])
def test_a_collective_gives_up_long_after_the_watchdog(timeout_s: float) -> None:
    """A legitimate wait for slow storage can take hours."""
    topology = Topology(
        rank=0,
        world_size=2,
        tp_size=1,
        uses_draft=True,
        device=local_device("cpu"),
        rank_timeout_s=timeout_s,
    )
    assert topology.collective_timeout.total_seconds() >= min(timeout_s, 30 * 86400) + 86400
