"""Which shards replicas try, and which leases they watch: few of each, and together all."""

from __future__ import annotations

from specdist.data.leases.shard_choice import MIN_WATCHED, first_choices, watch_period, watched


def test_many_replicas_try_different_shards_of_the_next_ones():
    unleased = list(range(100, 400, 3))
    choices = [first_choices(unleased, 30) for _ in range(20)]
    assert len({tried[0] for tried in choices}) > 5
    assert all(sorted(tried) == unleased[:30] for tried in choices)
    assert sorted(first_choices([3, 4], 100)) == [3, 4]
    assert first_choices([], 100) == []


def test_replicas_that_wait_watch_few_leases_each_and_all_of_them_in_a_few_periods():
    leased, num_waiting = [f"shard-{shard:05d}" for shard in range(200)], 200
    unseen = set(leased)
    for period in range(6):
        for replica in range(num_waiting):
            chosen = watched(leased, num_waiting, replica=f"replica{replica}", period=period)
            assert len(set(chosen)) == len(chosen) == MIN_WATCHED
            # As long as they are leased, the others do not matter.
            assert set(watched(chosen, num_waiting, replica=f"replica{replica}", period=period)) == set(
                chosen
            )
            unseen -= set(chosen)
    assert not unseen
    # As long as they are leased, it does not matter what else is.
    chosen = watched(leased, 200, replica="any", period=0)
    assert watched([leased[0], *chosen[::-1]], 200, replica="any", period=0) == chosen
    assert sorted(watched(leased, 1, replica="alone", period=0)) == leased
    assert sorted(watched(leased[:2], 200, replica="any", period=0)) == leased[:2]
    assert watched([], 200, replica="any", period=0) == []


def test_replicas_change_the_leases_that_they_watch_at_moments_of_their_own():
    replicas = [f"replica{number}" for number in range(100)]
    for now in (0.0, 149.0, 151.0):
        periods = [watch_period(now, 150.0, replica=replica) for replica in replicas]
        later = [watch_period(now + 15.0, 150.0, replica=replica) for replica in replicas]
        assert 1 <= sum(was != is_ for was, is_ in zip(periods, later, strict=True)) < 30
