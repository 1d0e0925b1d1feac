"""The planner's figures of hardware beside what other engines have published."""

from __future__ import annotations

import dataclasses
from statistics import median

import pytest

from specdist.lab.plan.hardware import GPUS
from tests.lab.public_tables import cases, predictions, size_of

MEDIAN, MOST = 0.12, 0.3


def test_published_figures_are_predicted() -> None:
    errors = [abs(one.error) for one in predictions() if one.error is not None]
    assert len(errors) == sum(case.found["gpu"] is not None for case in cases()) - 1
    assert median(errors) <= MEDIAN
    assert max(errors) <= MOST


def test_every_row_says_where_it_is_from() -> None:
    assert all(case.found["source"] and case.published > 0 for case in cases())


@pytest.mark.parametrize(
    ("figure", "factor"),
    [("bandwidth_efficiency", 0.6), ("arithmetic_efficiency", 0.5), ("link_latency_s", 8), ("kernel_s", 5)],
)
def test_a_wrong_figure_of_the_hardware_shows(
    figure: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these is far beyond what the rows allow."""
    for name, gpu in list(GPUS.items()):
        monkeypatch.setitem(GPUS, name, dataclasses.replace(gpu, **{figure: factor * getattr(gpu, figure)}))
    rows = [case for case in cases() if case.found["gpu"] is not None and not case.drafts]
    errors = [abs(case.predicted() / case.published - 1) for case in rows]
    assert median(errors) > MEDIAN or max(errors) > MOST


def test_a_cache_in_eight_bits_takes_a_scale_of_each_head() -> None:
    narrow = size_of("Llama-3.3-70B", True)
    plain = dataclasses.replace(narrow, has_float8_cache=False)
    # A head's 128 numbers have a scale of two bytes.
    assert plain.cache_bytes_per_token(2) * 130 == narrow.cache_bytes_per_token(2) * 256
    assert plain.cache_read_bytes(2, 100) * 130 == narrow.cache_read_bytes(2, 100) * 256
