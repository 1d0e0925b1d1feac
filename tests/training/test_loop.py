"""The loop that heads and drafts are trained by: steps, evaluations, patience and stops."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specdist.training.loop import evaluated_steps, run_steps


class Recorded:
    """Losses are the numbers of the steps before; the evaluations."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.evaluations: list[tuple[int, float]] = []

    def take_step(self, step: int) -> float:
        self.steps.append(step)
        return step

    def evaluate(self, step: int, loss: float) -> str:
        self.evaluations.append((step, loss))
        return ""

    def run(self, first: int = 0, **conditions: Callable[[], bool]) -> bool:
        is_over = conditions.pop("is_over", lambda: False)
        return run_steps(
            first, 8, self.take_step, self.evaluate,
            evaluated={2, 3, 8}, is_over=is_over, label="test", is_shown=False, **conditions,
        )  # fmt: skip


def test_an_evaluation_gets_the_mean_loss_since_the_last_one() -> None:
    found = Recorded()
    assert found.run()
    assert found.steps == list(range(8)) and found.evaluations == [(2, 0.5), (3, 2.0), (8, 5.0)]


def test_a_training_goes_on_after_the_steps_that_it_has_taken() -> None:
    found = Recorded()
    assert found.run(first=3)
    assert found.steps == [3, 4, 5, 6, 7] and found.evaluations == [(8, 5.0)]
    assert Recorded().run(first=8)


def test_one_that_is_over_is_complete_and_one_that_was_stopped_is_not() -> None:
    over, stopped = Recorded(), Recorded()
    assert over.run(is_over=lambda: len(over.evaluations) == 2)
    assert not stopped.run(is_stopped=lambda: len(stopped.evaluations) == 2)
    assert over.steps == stopped.steps == [0, 1, 2]
    assert over.run(first=3, is_over=lambda: True, is_stopped=lambda: True), "what is over needs no stop"


@pytest.mark.parametrize(
    ("steps_per_epoch", "epochs", "expected"),
    [(4, 2, [1, 2, 3, 4, 5, 6, 7, 8]), (24, 1, list(range(2, 25, 2))), (10, 20, list(range(10, 201, 10)))],
)
def test_every_epoch_is_evaluated_and_a_training_a_dozen_times(
    steps_per_epoch: int, epochs: int, expected: list[int]
) -> None:
    assert sorted(evaluated_steps(steps_per_epoch, epochs)) == expected
