"""Sums over ranks by peers' memory: used where they are right on every rank, and refused by all together."""

import pytest

from tests.ranks import run_ranks


def test_ranks_sum_through_peers_memory_where_it_is_right_and_faster_on_all_of_them() -> None:
    run_ranks("tests.models.peer_memory", 2)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sums_joined_with_norms_are_right_while_ranks_are_late_and_models_keep_their_logits(
    num_ranks: int,
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")
    run_ranks("tests.models.joined_sums", num_ranks)
