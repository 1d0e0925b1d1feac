"""The loop of a training: steps, and evaluations in between."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import tqdm

# Least evaluations of a training: epochs that are few are evaluated within.
LEAST_EVALUATIONS = 12


def run_steps(
    num_steps: int,
    take_step: Callable[[], float],
    evaluate: Callable[[int, float], str],
    *,
    evaluated: set[int],
    is_over: Callable[[], bool],
    label: str,
) -> None:
    """Take so many steps, or fewer if the training ``is_over``.

    Args:
        take_step: returns the loss.
        evaluate: after the steps ``evaluated``, given their number and the mean loss since the last one; for
            the progress bar.
    """
    losses: list[float] = []
    with tqdm.tqdm(total=num_steps, desc=label, unit="step", disable=None) as bar:
        for step in range(num_steps):
            if is_over():
                break
            losses.append(take_step())
            bar.update(1)
            if step + 1 in evaluated:
                bar.set_postfix_str(evaluate(step + 1, float(np.mean(losses))))
                losses = []


def evaluated_steps(steps_per_epoch: int, epochs: int) -> set[int]:
    """The end of every epoch, and steps in between where epochs are few."""
    per_epoch = min(steps_per_epoch, math.ceil(LEAST_EVALUATIONS / epochs))
    within = {steps_per_epoch * (index + 1) // per_epoch for index in range(per_epoch)}
    return {epoch * steps_per_epoch + step for epoch in range(epochs) for step in within}
