"""Sums over ranks by peers' memory: used where they are right on every rank, and refused by all together."""

from tests.ranks import run_ranks


def test_ranks_sum_through_peers_memory_where_it_is_right_and_faster_on_all_of_them() -> None:
    run_ranks("tests.models.peer_memory", 2)
