"""Which shards replicas try, and which leases they watch: few of each, and together all."""

from __future__ import annotations

from specdist.data.leases.shard_choice import MIN_WATCHED, first_choices, name_hashes, watch_period, watched


def test_many_replicas_try_different_shards_near_the_leased_ones():
    leased = range(100, 400, 3)
    unleased = [shard for shard in range(1000) if shard not in leased]
    choices = [list(first_choices(unleased, leased, 100)) for _ in range(20)]
    assert len({tried[0] for tried in choices}) > 10
    for tried in choices:
        assert len(set(tried)) == len(tried) == 200
        assert min(tried) >= 100 and not set(leased) & set(tried)


def test_the_first_shards_are_tried_once_none_is_left_after_the_leased_ones():
    assert set(first_choices([3, 4], [90], 100)) == {3, 4}
    assert not list(first_choices([], [90], 100))
    assert set(first_choices([3, 4, 5], [], 1)) == {3, 4}


def test_replicas_that_wait_watch_few_leases_each_and_all_of_them_in_a_few_periods():
    leased, num_waiting = [f"shard-{shard:05d}" for shard in range(200)], 200
    unseen, hashes = set(leased), name_hashes(leased)
    for period in range(6):
        for replica in range(num_waiting):
            chosen = watched(leased, hashes, num_waiting, replica=f"replica{replica}", period=period)
            assert len(chosen) == MIN_WATCHED and chosen == sorted(chosen)
            unseen -= set(chosen)
    assert not unseen
    assert watched(leased, hashes, 1, replica="alone", period=0) == leased
    assert watched(leased[:2], hashes[:2], 200, replica="any", period=0) == leased[:2]
    assert watched(leased[:3], hashes[:3], 200, replica="any", period=0, mine=leased[1:2]) == leased[0:3:2]


def test_replicas_change_the_leases_that_they_watch_at_moments_of_their_own():
    replicas = [f"replica{number}" for number in range(100)]
    for now in (0.0, 149.0, 151.0):
        periods = [watch_period(now, 150.0, replica=replica) for replica in replicas]
        later = [watch_period(now + 15.0, 150.0, replica=replica) for replica in replicas]
        assert 1 <= sum(was != is_ for was, is_ in zip(periods, later, strict=True)) < 30
