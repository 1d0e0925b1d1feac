"""The planner beside what other engines have published: long, and run by its name."""

from __future__ import annotations

import math
from statistics import median
from types import ModuleType

import pytest

from specdist.lab.plan import roofline
from specdist.utils.table import Table
from tests.lab.plan import placements, public
from tests.lab.plan.public import (
    FOUND,
    PAGE,
    Prediction,
    errors,
    held_out,
    is_predicted,
    kind_of,
    markdown,
    predictions,
)


@pytest.mark.parametrize(
    ("group", "middle", "most"),
    [
        ("dense models", 0.07, 0.28), ("the same, without MLPerf", 0.04, 0.17), ("experts", 0.15, 0.37),
        ("prompts of 32,768 tokens", 0.15, 0.17), ("gains of DFlash on experts", 0.1, 0.21),
    ],
)  # fmt: skip
def test_published_figures_are_predicted(group: str, middle: float, most: float) -> None:
    """Those that nothing was fitted to as well as the others."""
    found = [found for is_held_out in (True, False) if (found := errors(group, is_held_out=is_held_out))]
    for each in found:
        assert median(each) <= middle + 0.005 and max(each) <= most + 0.005


def test_a_third_of_the_rows_is_held_out_of_all_fits() -> None:
    for kind in ("dense", "experts"):
        rows = [row for row in FOUND["rows"] if kind_of(row) == kind]
        held = [row for row in rows if Prediction(row, "", 1, 1).is_held_out]
        assert len(held) == math.ceil(len(rows) / 3)
    assert len(held_out()) == 25 and len(FOUND["rows"]) == 83
    assert sum(map(is_predicted, FOUND["rows"])) == 76


def test_the_page_has_these_figures() -> None:
    assert f"<!-- published:begin -->\n\n{markdown()}\n\n<!-- published:end -->" in PAGE.read_text()
    assert len(predictions()) == 86


def test_the_page_of_placements_has_the_planners_figures() -> None:
    assert Table.of([*placements.lines()], num_names=4).markdown() in placements.PAGE.read_text()


@pytest.mark.parametrize(
    ("where", "figure", "factor"),
    [
        (public, "EXPERTS_RATE", 2), (public, "THEIR_ATTENTION_RATE", 0.3), (public, "SLOWEST", 0.7),
        (roofline, "EXPERT_TILE_ROWS", 0.02), (roofline, "ROW_S", 8),
    ],
)  # fmt: skip
def test_a_wrong_figure_of_experts_shows(
    where: ModuleType, figure: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is far beyond what the rows allow."""
    runs = [public.Run(row) for row in FOUND["rows"] if is_predicted(row) and kind_of(row) == "experts"]
    monkeypatch.setattr(where, figure, factor * getattr(where, figure))
    found = [abs(run.predicted() / run.published - 1) for run in runs]
    assert median(found) > 0.15 or max(found) > 0.4
