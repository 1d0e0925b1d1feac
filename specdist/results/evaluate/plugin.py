"""A user's function as a task: ``--task module:function``."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from specdist.results.evaluate.config import EvaluateConfig
from specdist.results.evaluate.reading import Completions
from specdist.results.evaluate.scores import ERROR, Metric, Scores, Scoring, identity_columns
from specdist.results.evaluate.tasks.texts import cut
from specdist.utils.errors import UserError


def load_function(name: str) -> Callable[[dict[str, Any]], Any]:
    """Import ``module:function``, also from the working folder. Raises :class:`UserError`."""
    module_name, function_name = name.split(":")
    # Python searches the folder of the script, not the working folder.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"--task {name} cannot be loaded: {error}") from error
    if not callable(function):
        raise UserError(f"--task {name} is not a function")
    return function


def plugin(completions: Completions, config: EvaluateConfig) -> Scoring:
    """Raises :class:`UserError` if the function cannot be loaded."""
    assert config.task is not None
    return partial(_score, completions, config, load_function(config.task))


def _score(
    completions: Completions, config: EvaluateConfig, function: Callable[[dict[str, Any]], Any]
) -> Scores:
    """Call the function with each row, a dictionary of all columns; it returns a number, or numbers by name.

    Rows that ended with an error get 0 without a call. Raises :class:`UserError` if the function raises, or
    returns a number that is not finite or names that differ between rows.
    """
    assert config.task is not None
    rows = completions.rows()
    found: list[dict[str, float] | None] = []
    for row in rows:
        if row["finish_reason"] == ERROR:
            found.append(None)
            continue
        text = cut(row["completion"], config.cut_at)
        found.append(_call(config.task, function, {**row, "completion": text}))
    names = next((set(scores) for scores in found if scores is not None), set())
    for row, scores in zip(rows, found, strict=True):
        if scores is not None and set(scores) != names:
            raise UserError(
                f"--task {config.task}: row {row['row_id']} has the scores {sorted(scores)}, others have "
                f"{sorted(names)}; all rows need the same names"
            )
    numbers = {name: [0.0 if each is None else each[name] for each in found] for name in sorted(names)}
    row_ids = [row["row_id"] for row in rows]
    return Scores(
        columns={**numbers, **identity_columns(rows)},
        metrics={name: Metric.of(row_ids, values) for name, values in numbers.items()},
    )


def _call(task: str, function: Callable[[dict[str, Any]], Any], row: dict[str, Any]) -> dict[str, float]:
    where = f"--task {task}: row {row['row_id']}, sample {row['sample_index']}"
    try:
        answer = function(row)
    except Exception as error:  # a user's function can raise anything
        raise UserError(f"{where}: the function raised {error!r}") from error
    scores = answer if isinstance(answer, dict) else {"score": answer}
    for name, value in scores.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise UserError(f"{where}: {name} is {value!r}, but must be a finite number")
    return {str(name): float(value) for name, value in scores.items()}
