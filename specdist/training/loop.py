"""The loop of a training, of heads and of drafts: steps, and evaluations in between."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import tqdm

# Least evaluations of a training: epochs that are few are evaluated within.
LEAST_EVALUATIONS = 12


def run_steps(
    first: int,
    num_steps: int,
    take_step: Callable[[int], float],
    evaluate: Callable[[int, float], str],
    *,
    evaluated: set[int],
    is_over: Callable[[], bool],
    is_stopped: Callable[[], bool] = lambda: False,
    label: str,
    is_shown: bool = True,
) -> bool:
    """Take the steps after the ``first`` ones, until there are ``num_steps`` or the training ``is_over``;
    whether it has come so far, and was not stopped.

    Args:
        take_step: given the number of steps before it; the loss.
        evaluate: after the steps ``evaluated``, given their number and the mean loss since the last one; for
            the progress bar.
    """
    losses: list[float] = []
    bar = tqdm.tqdm(
        total=num_steps, initial=first, desc=label, unit="step", disable=None if is_shown else True
    )
    with bar:
        for step in range(first, num_steps):
            if is_over():
                break
            if is_stopped():
                return False
            losses.append(take_step(step))
            bar.update(1)
            if step + 1 in evaluated:
                bar.set_postfix_str(evaluate(step + 1, float(np.mean(losses))))
                losses = []
    return True


def evaluated_steps(steps_per_epoch: int, epochs: int) -> set[int]:
    """The end of every epoch, and steps in between where epochs are few."""
    per_epoch = min(steps_per_epoch, math.ceil(LEAST_EVALUATIONS / epochs))
    within = {steps_per_epoch * (index + 1) // per_epoch for index in range(per_epoch)}
    return {epoch * steps_per_epoch + step for epoch in range(epochs) for step in within}
