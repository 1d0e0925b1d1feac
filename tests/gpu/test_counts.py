"""The counts of what a device is given: no number is worse than it was, and the planner reckons with them."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from tests.gpu import check_counts
from tests.gpu.processes import needs_fake_device, on_device

pytestmark = needs_fake_device


@pytest.mark.parametrize(("family", "most"), [("llama", 10), ("gemma", 10), ("qwen3", 12), ("gemma2", 10)])
def test_a_layer_has_few_kernels(family: str, most: int) -> None:
    """The last two have four norms."""
    on_device(check_counts.check_kernels, family, most)


def test_a_token_is_rounded_by_one_kernel() -> None:
    """For all layers that read it; in plain operations by six or seven."""
    on_device(check_counts.check_rounding)


def test_the_host_waits_once_for_a_pass_and_twice_or_less_for_a_draft() -> None:
    on_device(check_counts.check_waits)


def test_the_planner_reckons_with_what_the_engine_does() -> None:
    """If not: python -m tests.gpu.counts --write"""
    on_device(check_counts.check_planned)
