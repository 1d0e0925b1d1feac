"""The loop that heads are trained by: steps, evaluations and patience."""

from __future__ import annotations

import pytest

from specdist.training.heads.loop import evaluated_steps, run_steps


class Recorded:
    """Losses are the numbers of the steps before; the evaluations."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.evaluations: list[tuple[int, float]] = []

    def take_step(self) -> float:
        self.num_steps += 1
        return self.num_steps - 1

    def evaluate(self, step: int, loss: float) -> str:
        self.evaluations.append((step, loss))
        return ""

    def run(self, most_evaluations: int = 9) -> None:
        def is_over() -> bool:
            return len(self.evaluations) == most_evaluations

        run_steps(8, self.take_step, self.evaluate, evaluated={2, 3, 8}, is_over=is_over, label="test")


def test_an_evaluation_gets_the_mean_loss_since_the_last_one() -> None:
    found = Recorded()
    found.run()
    assert found.num_steps == 8 and found.evaluations == [(2, 0.5), (3, 2.0), (8, 5.0)]


def test_one_that_is_over_takes_no_more_steps() -> None:
    found = Recorded()
    found.run(most_evaluations=2)
    assert found.num_steps == 3


@pytest.mark.parametrize(
    ("steps_per_epoch", "epochs", "expected"),
    [(4, 2, [1, 2, 3, 4, 5, 6, 7, 8]), (10, 20, list(range(10, 201, 10)))],
)
def test_every_epoch_is_evaluated_and_a_training_a_dozen_times(
    steps_per_epoch: int, epochs: int, expected: list[int]
) -> None:
    assert sorted(evaluated_steps(steps_per_epoch, epochs)) == expected
