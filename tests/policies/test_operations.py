"""Operations and calls per token by hand, and as the paper counts them."""

import pytest

from specdist.data.stats.shard import Stats
from specdist.job.totals.predictions import TokenFlops, operations_of

FLOPS = TokenFlops(target=100.0, draft=10.0, head=1.0)


def some_stats() -> Stats:
    """Blocks of 4, 2 and 0 candidates, of which 3, 2 and 0 were kept: with the tokens after them, eight."""
    stats = Stats(num_completion_tokens=8, num_head_tokens=5)
    for drafted, accepted in ((4, 3), (2, 2), (0, 0)):
        stats.observe_block(num_drafted=drafted, num_accepted=accepted)
    stats.observe_draft_passes([2, 1, 1, 1, 2])
    return stats


def test_operations_by_hand() -> None:
    # The target has run three next tokens and six candidates, the draft seven tokens.
    exact = operations_of(some_stats(), FLOPS, is_exact=True)
    lossy = operations_of(some_stats(), FLOPS, is_exact=False)
    for found in (exact, lossy):
        assert found["target_calls_per_token"].predicted == pytest.approx(1 / 3)
        assert found["target_calls_per_token"].measured == pytest.approx(3 / 8)
        assert found["target_flops_per_token"].measured == pytest.approx(900 / 8)
        assert found["flops_per_token"].measured == pytest.approx((900 + 70 + 5) / 8)
    # A mean block of 3: 3 x 110 in the one way, 3 x 10 + 100 + 1 in the other.
    assert exact["flops_per_token"].predicted == pytest.approx(110)
    assert exact["target_flops_per_token"].predicted == pytest.approx(100)
    assert lossy["flops_per_token"].predicted == pytest.approx(131 / 3)
    assert lossy["target_flops_per_token"].predicted == pytest.approx(100 / 3)


def test_where_nothing_is_drafted_nothing_is_compared() -> None:
    stats = Stats(num_completion_tokens=4)
    stats.observe_block(num_drafted=0, num_accepted=0)
    assert operations_of(stats, FLOPS, is_exact=True) == {}
