"""A replica in which no rank makes progress ends after --rank_timeout, and shows where it was."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors import safe_open

from specdist.config.generate import GenerateConfig, parse_generate_config
from specdist.job.ranks import entry, watchdog
from specdist.job.ranks.activity import Activity
from specdist.job.ranks.signals import StopRequest
from specdist.job.ranks.topology import Topology, local_device
from tests.job.launching import Main, run_here
from tests.job.pair import Pair
from tests.job.ranks import started_ranks

NUM_RANKS = 2
AT_A_TIME = 4
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


# Jobs of two ranks that hang in one way each, without a model. Called in the ranks.
STEP_S, NUM_STEPS = 0.3, 22
Work = Callable[[Topology, Activity], None]


def run(work: Work, arguments: Sequence[str]) -> int:
    """A rank whose work this is."""

    def at_work(config: GenerateConfig, topology: Topology, stop: StopRequest, activity: Activity) -> int:
        del config, stop
        work(topology, activity)
        return 0

    config = parse_generate_config(arguments)
    return entry.run_rank(config, config, at_work)


def hang() -> None:
    """Like a read from a server that does not answer."""
    while True:
        time.sleep(3600)


def one_hangs(arguments: Sequence[str]) -> int:
    """While it loads; the other waits for it in a collective."""

    def work(topology: Topology, activity: Activity) -> None:
        if topology.rank == 1:
            activity.begin("loading the draft")
            hang()
        activity.begin("waiting until every rank has loaded")
        dist.barrier()

    return run(work, arguments)


def one_is_slow(arguments: Sequence[str]) -> int:
    """It takes longer than a rank may hang, in many steps; the other waits for it."""

    def work(topology: Topology, activity: Activity) -> None:
        if topology.rank == 1:
            for _ in range(NUM_STEPS):
                time.sleep(STEP_S)
                activity.step()
        dist.barrier()

    return run(work, arguments)


def one_never_comes(arguments: Sequence[str]) -> int:
    """It hangs before it has met the other."""
    if os.environ["RANK"] == "1":
        hang()
    return run(lambda topology, activity: None, arguments)


def one_does_not_leave(arguments: Sequence[str]) -> int:
    """The other is at the last barrier."""

    def work(topology: Topology, activity: Activity) -> None:
        del activity
        if topology.rank == 1:
            hang()

    return run(work, arguments)


def one_hangs_at_its_end(arguments: Sequence[str]) -> int:
    """In the teardown of a library."""
    if os.environ["RANK"] == "1":
        entry.dist.destroy_process_group = hang
    return run(lambda topology, activity: None, arguments)


def hold_the_interpreter() -> None:
    """Like an extension that reads without letting other threads run."""
    sleep = ctypes.PyDLL(None).sleep
    while True:
        sleep(3600)


def one_holds_its_interpreter(arguments: Sequence[str]) -> int:
    """None of its threads can run."""

    def work(topology: Topology, activity: Activity) -> None:
        activity.begin("loading the draft")
        if topology.rank == 1:
            hold_the_interpreter()
        dist.barrier()

    return run(work, arguments)


def all_hold_their_interpreters(arguments: Sequence[str]) -> int:
    """No thread of any rank can run."""
    watchdog.HELD_MARGIN_S = 1.0
    return run(lambda topology, activity: hold_the_interpreter(), arguments)


# Jobs that load nothing, and wait more than they work.
STILL: list[Main] = [
    one_hangs,
    one_is_slow,
    one_does_not_leave,
    one_hangs_at_its_end,
    one_holds_its_interpreter,
    all_hold_their_interpreters,
]


OPTIONS: dict[str, Any] = {
    "prompts": "none", "target": "none", "draft": "none-either", "device": "cpu",
    "rank_timeout": TIMEOUT_S, "output": "none",
}  # fmt: skip


@pytest.fixture(scope="module")
def still() -> Callable[[Main], Outcome]:
    """The outcome of each of them; so many run at a time."""
    pool = ThreadPoolExecutor(AT_A_TIME)
    found = {main: pool.submit(ended, main, OPTIONS) for main in STILL}
    return lambda main: found[main].result()


def stacks(words: str) -> Iterator[str]:
    """The functions in them, innermost first."""
    for line in words.splitlines():
        if line.startswith('  File "') and " in " in line:
            yield line.rpartition(" in ")[2]


def test_a_rank_that_hangs_while_it_loads_ends_its_replica(still: Callable[[Main], Outcome]) -> None:
    found = still(one_hangs)
    assert found.codes == [1] * NUM_RANKS
    for rank, said in enumerate(found.words):
        assert "this replica ends: no rank has made progress for 5 s (--rank_timeout)" in said
        assert "s in: waiting until every rank has loaded; rank 1 (draft) for" in said
        assert "s in: loading the draft" in said
        assert ("hang" if rank == 1 else "barrier") in set(stacks(said))


def test_a_rank_that_is_slow_is_waited_for(still: Callable[[Main], Outcome]) -> None:
    """It takes longer than all ranks together may hang."""
    assert STEP_S * NUM_STEPS > 1.2 * TIMEOUT_S
    found = still(one_is_slow)
    assert found.codes == [0] * NUM_RANKS, found.words
    assert not any("this replica ends" in said for said in found.words), found.words


def test_a_rank_that_does_not_arrive_is_named() -> None:
    with started_ranks(NUM_RANKS, one_never_comes, **OPTIONS) as world:
        world.processes[0].join(SOON_S)
        assert world.processes[0].exitcode == 1
        assert "rank 1 (draft) of 2 ranks did not arrive within 5 s" in world.words("stderr")[0]


def test_the_last_barrier_has_a_timeout(still: Callable[[Main], Outcome]) -> None:
    found = still(one_does_not_leave)
    assert found.codes == [1] * NUM_RANKS
    for rank, said in enumerate(found.words):
        assert "rank 0 (target 1/1) for" in said and "s in: leaving; rank 1 (draft) for" in said
        assert ("hang" if rank == 1 else "barrier") in set(stacks(said))


def test_a_rank_that_hangs_at_its_end_harms_no_other(still: Callable[[Main], Outcome]) -> None:
    found = still(one_hangs_at_its_end)
    assert found.codes == [0, 1]
    assert "hang" in set(stacks(found.words[1]))


def test_a_rank_whose_interpreter_is_held_shows_its_stacks_and_is_ended(
    still: Callable[[Main], Outcome],
) -> None:
    found = still(one_holds_its_interpreter)
    assert found.codes == [1, -signal.SIGKILL]
    assert "this replica ends: rank 1 (draft): process" in found.words[0]
    assert "has been silent for 5 s (--rank_timeout), while loading the draft" in found.words[0]
    assert "hold_the_interpreter" in set(stacks(found.words[1]))


def test_ranks_whose_interpreters_are_all_held_end_themselves(still: Callable[[Main], Outcome]) -> None:
    found = still(all_hold_their_interpreters)
    assert found.codes == [1] * NUM_RANKS
    assert all("hold_the_interpreter" in set(stacks(said)) for said in found.words)


def num_tensors(folder: Path) -> int:
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            total += len(file.keys())
    return total


def test_loading_and_measuring_are_counted_in_steps(
    options: dict[str, Any], pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor that is read, and each pass that is run, is one."""
    counts, step = Counter[str](), Activity.step

    def counted(activity: Activity) -> None:
        counts[activity.phase] += 1
        step(activity)

    monkeypatch.setattr(Activity, "step", counted)
    # A policy that needs measured costs.
    changes = {"policy": "goodput", "limit": 1, "max_new_tokens": 2, "max_num_seqs": 2}
    assert run_here(**(options | changes), output=tmp_path / "run").code == 0
    assert counts["loading the target"] > num_tensors(pair.target)
    assert counts["loading the draft"] > num_tensors(pair.draft)
    assert sum(number for phase, number in counts.items() if phase.startswith("measuring ")) > 10, counts


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
