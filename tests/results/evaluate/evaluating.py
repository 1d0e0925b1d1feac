"""Runs the evaluation job in this process."""

from __future__ import annotations

from typing import Any

from specdist.config.arguments import parse_arguments
from specdist.results.evaluate.config import EvaluateConfig
from specdist.results.evaluate.run import run_evaluation
from tests.job.launching import arguments


def evaluate(run: Any, **options: Any) -> tuple[str, dict[str, Any]]:
    """What jobs/evaluate.py prints, and the JSON document on its last line."""
    given = [str(run), *arguments(**options)]
    return run_evaluation(parse_arguments(EvaluateConfig, given, positional="run"))


def values(run: Any, **options: Any) -> dict[str, float]:
    """The figures by metric."""
    return {name: found["value"] for name, found in evaluate(run, **options)[1]["metrics"].items()}
