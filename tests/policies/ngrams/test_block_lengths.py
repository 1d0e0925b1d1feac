"""What a token of n-grams must promise to be verified."""

from __future__ import annotations

import numpy as np
import pytest

from specdist.policies.costs import CostModel, Curve
from specdist.policies.ngrams.block_lengths import BlockLengths

MS = 10**6
NUM_ROWS = 10
# Of one sequence of ten: a token and all before it are right.
CHANCES = np.array([0.9, 0.7, 0.5, 0.3, 0.1])


def kept(costs: CostModel | None, lengths: BlockLengths | None = None) -> int:
    lengths_R = (lengths or BlockLengths(costs)).lengths(
        CHANCES,
        np.array([len(CHANCES)] + [0] * (NUM_ROWS - 1)),
        num_pass_tokens=NUM_ROWS,
        num_rows=NUM_ROWS,
        num_context=0.0,
    )
    return int(lengths_R[0])


def pass_of(first_ms: float, token_ms: float, *, host_ms: float = 0.0) -> CostModel:
    """A pass takes ``first_ms``, and ``token_ms`` more for every token beyond one of each sequence."""
    times = [round(ms * MS) for ms in (first_ms, first_ms, first_ms + 90 * token_ms)]
    return CostModel(
        Curve([1, NUM_ROWS, NUM_ROWS + 90], times), Curve([1], [0]), message=Curve([1], [round(host_ms * MS)])
    )


@pytest.mark.parametrize(
    ("costs", "num_kept"),
    [
        (None, 5),
        (pass_of(10, 0.0), 5),
        # Ten tokens in ten milliseconds: a token is worth what it takes where its chance is the same number.
        (pass_of(10, 0.4), 3),
        (pass_of(10, 0.8), 1),
        (pass_of(10, 1.0), 0),
        # In rounds of twice that time, half as much.
        (pass_of(10, 0.8, host_ms=10), 3),
    ],
)
def test_a_token_is_verified_where_it_is_worth_the_time(costs: CostModel | None, num_kept: int) -> None:
    assert kept(costs) == num_kept


def test_a_batch_that_is_faster_than_plain_decoding_has_less_time_for_a_token() -> None:
    """By what rounds have committed; the host's part of them is a part of their time."""
    # 30 tokens in 18 ms, of which one in 0.4 ms are 0.67; in 45 ms 0.27.
    for host_ms, num_kept in ((0, 2), (27, 4)):
        costs = pass_of(10, 0.4, host_ms=host_ms)
        lengths = BlockLengths(costs)
        for _ in range(50):
            lengths.observe_round(30, num_pass_tokens=30, num_rows=NUM_ROWS, num_context=0.0)
        assert kept(costs, lengths) == num_kept
