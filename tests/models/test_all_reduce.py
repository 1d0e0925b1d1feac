"""Sums over ranks by peers' memory: used where they are right on every rank, and refused by all together."""

from types import SimpleNamespace

import pytest
import torch

from specdist.models.passes.peer_memory import TwoShotMemory
from tests.ranks import run_ranks


def test_ranks_sum_through_peers_memory_where_it_is_right_and_faster_on_all_of_them() -> None:
    run_ranks("tests.models.peer_memory", 2)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sums_joined_with_norms_are_right_while_ranks_are_late_and_models_keep_their_logits(
    num_ranks: int,
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")
    run_ranks("tests.models.joined_sums", num_ranks)


def test_what_is_summed_in_peers_memory_is_not_written_over_by_the_next_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    doubled = lambda own_N, *_: own_N.mul_(2)  # noqa: E731
    monkeypatch.setattr(torch.ops.symm_mem, "two_shot_all_reduce_", doubled, raising=False)
    memory = TwoShotMemory.__new__(TwoShotMemory)
    memory._buffer_N, memory._group = torch.zeros(8), SimpleNamespace(group_name="")  # type: ignore[assignment]
    first, second = (memory.sum(torch.full((4,), number)) for number in (1.0, 5.0))
    assert (first.tolist(), second.tolist()) == ([2.0] * 4, [10.0] * 4)
