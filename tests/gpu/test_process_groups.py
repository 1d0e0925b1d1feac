"""The fake backends: ranks that cannot meet fail at once, with the stacks of both."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

from tests.forked import started_world
from tests.gpu import disagreements
from tests.gpu.meetings import GLOO, NCCL, Call, Meetings
from tests.gpu.referee import refereed

pytestmark = pytest.mark.ranks

NUM_RANKS = 2
# Faults are found at once, long before this.
PATIENT_S = 100.0
PATIENCE_S = 1.0


class Ended:
    """How two ranks ended."""

    def __init__(
        self, fault: str, folder: Path, timeout_s: float = PATIENT_S, *, ends_others: bool = False
    ) -> None:
        """``ends_others``: rank 1 is killed when rank 0 has ended."""
        with refereed(timeout_s) as referee:
            arguments = (fault, str(folder / "rendezvous"))
            with started_world(
                NUM_RANKS, disagreements.rank, *arguments, environment=referee.environment
            ) as world:
                world.processes[0].join(PATIENT_S / 2)
                if ends_others:
                    world.processes[1].kill()
                world.processes[1].join(PATIENT_S / 2)
                self.codes = [process.exitcode for process in world.processes]
                self.stdout, self.stderr = world.words("stdout"), world.words("stderr")
        self.failure = referee.failure
        self.counts: dict[int, Counter[tuple[str, str, str]]] = referee.counts


@pytest.mark.parametrize(
    ("fault", "differing"),
    [
        ("in_another_order", "operation, root"),
        ("on_another_backend", "backend"),
        ("another_shape", "shape"),
        ("another_dtype", "dtype"),
        ("another_root", "root"),
        ("another_reduction", "detail"),
        ("in_another_group", "group"),
        ("a_message_of_another_shape", "shape"),
        ("messages_to_one_another", "root"),
        ("a_message_and_a_barrier", "operation"),
        ("an_object_and_a_barrier", "operation"),
        ("one_replays_what_the_other_does_not", "operation, backend"),
    ],
)
def test_ranks_that_cannot_meet_fail_at_once_with_both_stacks(
    fault: str, differing: str, tmp_path: Path
) -> None:
    ended = Ended(fault, tmp_path)
    assert ended.codes == [1, 1], ended.stderr
    assert ended.failure is not None, ended.stderr
    assert ended.failure.startswith(f"collectives do not match ({differing}")
    for words in ended.stderr:
        assert ended.failure in words
    assert set(stacks_of(ended.failure)) == {0, 1}
    for stack in stacks_of(ended.failure).values():
        assert f" {fault}" in stack[-1] and stack[-1].startswith("tests/gpu/disagreements.py:")


def stacks_of(failure: str) -> dict[int, list[str]]:
    """By rank, the lines of the program, the innermost last."""
    parts = re.split(r"^rank (\d+): .*$", failure, flags=re.MULTILINE)[1:]
    return {
        int(rank): [line.strip() for line in lines.strip().splitlines()]
        for rank, lines in zip(parts[::2], parts[1::2], strict=True)
    }


def test_waiting_for_a_rank_that_never_arrives_ends_soon(tmp_path: Path) -> None:
    """The message says where it is instead."""
    ended = Ended("one_stays_away", tmp_path, PATIENCE_S, ends_others=True)
    assert ended.codes == [1, -SIGKILL], ended.stderr
    assert ended.failure is not None and ended.failure in ended.stderr[0]
    assert ended.failure.startswith(
        "rank 0 has waited 1 s for rank 1 to begin all_reduce on NCCL in the world"
    )
    stacks = stacks_of(ended.failure)
    assert stacks[0][-1].endswith(" one_stays_away") and stacks[1][-1].endswith(" one_stays_away")
    assert "rank 1: in no collective" in ended.failure


def test_gloo_notices_that_a_rank_has_ended(tmp_path: Path) -> None:
    ended = Ended("one_ends_before_gloo", tmp_path)
    assert ended.codes == [1, 0], ended.stderr
    assert "RuntimeError: [gloo] Connection closed by peer: rank 1 has ended" in ended.stderr[0]


def test_nccl_does_not_notice_that_a_rank_has_ended(tmp_path: Path) -> None:
    """On GPUs nothing wakes the rank that waits: the job's watchdog has to end it."""
    ended = Ended("one_ends_before_nccl", tmp_path, PATIENCE_S)
    assert ended.codes == [1, 0], ended.stderr
    assert ended.failure is not None and "rank 1: has ended" in ended.failure
    assert ended.failure.startswith("rank 0 has waited 1 s for rank 1")


def test_what_a_backend_refuses_is_refused_before_any_rank_waits(tmp_path: Path) -> None:
    ended = Ended("what_one_rank_is_refused", tmp_path)
    assert ended.codes == [0, 0], (ended.stdout, ended.stderr)
    for own, words in enumerate(ended.stdout):
        assert words.splitlines() == [
            "all_reduce: NCCL takes contiguous tensors, not strides (4, 2)",
            "all_reduce: NCCL has no data type for torch.int16",
            "all_gather of tensors on two devices: ['cpu', 'cpu', 'cuda:0']",
            "all_gather: 2 tensors like [4] torch.float32 and [5] torch.float32 in the list, for 2 ranks' "
            "tensors like [4] torch.float32",
            "all_reduce with async_op=True is not faked",
            "torch.distributed.all_to_all_single is not faked: see tests/gpu/process_groups.py",
            "barrier on gloo while a graph is captured: no replay would repeat it",
            "all_reduce: operation not permitted when stream is capturing: NCCL's first call in a group "
            "connects it",
            f"all_reduce: a tensor on cuda:0 on the rank whose device is cuda:{own + 1}",
        ]
    assert not ended.counts.get(0)


def test_collectives_give_what_torch_gives_and_are_counted(tmp_path: Path) -> None:
    ended = Ended("all_is_well", tmp_path)
    assert ended.codes == [0, 0], (ended.stdout, ended.stderr)
    assert ended.failure is None
    world, group = "the world", "group 1"
    counts = ended.counts[0]
    for backend in (NCCL, GLOO):
        assert counts["all_reduce", backend, group] == counts["gather", backend, group] == 1
        assert counts["send", backend, world] == ended.counts[1]["recv", backend, world] == 1
    assert counts["broadcast", NCCL, world] == 1
    # An object's size, and the object.
    assert counts["broadcast", GLOO, world] == 1 + 2
    assert counts["all_gather", GLOO, world] == 1 + 2
    assert counts["new_group", GLOO, world] == 2
    assert counts["barrier", GLOO, world] == 1


def call(rank: int, name: str, *members: int, **changes: Any) -> Call:
    return Call(rank=rank, name=name, backend=NCCL, group="a group", members=members, **changes)


def test_a_deadlock_of_three_ranks_is_found() -> None:
    meetings = Meetings()
    assert meetings.enter(call(0, "broadcast", 0, 1)) == {}
    assert meetings.enter(call(1, "broadcast", 1, 2)) == {}
    answers = meetings.enter(call(2, "broadcast", 0, 2))
    assert set(answers) == {0, 1, 2} and len(set(answers.values())) == 1
    assert meetings.failure is not None and "do not match (group)" in meetings.failure
    # A rank that arrives later gets the error too.
    assert meetings.enter(call(0, "barrier", 0)) == {0: meetings.failure}


def test_a_rank_that_is_busy_elsewhere_is_waited_for() -> None:
    meetings = Meetings()
    assert meetings.enter(call(0, "broadcast", 0, 1, 2)) == {}
    assert meetings.enter(call(1, "all_reduce", 1, 2)) == {}
    assert meetings.enter(call(2, "all_reduce", 1, 2)) == {1: None, 2: None}
    assert meetings.enter(call(1, "broadcast", 0, 1, 2)) == {}
    assert meetings.enter(call(2, "broadcast", 0, 1, 2)) == {0: None, 1: None, 2: None}
    assert meetings.failure is None and not meetings.waiting
