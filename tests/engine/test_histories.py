"""Where the history of a row is kept: in its slot, and aside while the row is preempted."""

import numpy as np

from specdist.engine.draft.steps.histories import Histories
from specdist.policies import FixedLength, HfHeuristic


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def lengths(histories: Histories) -> list[float]:
    return histories.of(np.arange(3))[:, 0].tolist()


def test_histories_begin_are_updated_and_move_with_their_rows() -> None:
    histories = Histories(HfHeuristic(num_draft_tokens=5, max_draft_tokens=20), num_slots=3)
    histories.open(ints(2, 0, 1), ints(70, 71, 72))
    histories.observe(ints(1, 2), ints(5, 5), ints(5, 0))
    # A row without candidates has no block.
    histories.observe(ints(0, 1), ints(0, 7), ints(0, 3))
    histories.observe(ints(0), ints(0), ints(0))
    assert lengths(histories) == [5, 6, 4]
    # Both rows with a history are preempted, and a new row takes one of their slots in the same round.
    histories.suspend(ints(2, 1), ints(70, 72))
    histories.open(ints(1), ints(73))
    assert lengths(histories)[1] == 5
    histories.observe(ints(1), ints(5), ints(5))
    # They come back with their slots exchanged.
    histories.open(ints(2, 0), ints(72, 70))
    assert lengths(histories) == [4, 7, 6]
    # A saved history is used once: the next row of the stream would begin with a new one.
    histories.open(ints(2), ints(72))
    assert lengths(histories) == [4, 7, 5]


def test_a_policy_may_have_no_history() -> None:
    histories = Histories(FixedLength(3), num_slots=2)
    histories.open(ints(0), ints(9))
    histories.observe(ints(0, 1), ints(3, 0), ints(2, 0))
    histories.suspend(ints(0), ints(9))
    assert histories.of(ints(1, 0)).shape == (2, 0)
