"""The counts of what a device is given: no number is worse than it was, and the planner reckons with them."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from tests.gpu import check_counts
from tests.gpu.processes import needs_fake_device, on_device

pytestmark = needs_fake_device


def test_a_layer_has_few_kernels() -> None:
    """Gemma 2 has four norms, and Qwen 3 norms its heads."""
    on_device(check_counts.check_kernels, {"llama": 10, "gemma2": 10, "qwen3": 12})


def test_a_token_is_rounded_by_one_kernel() -> None:
    """For all layers that read it; in plain operations by six or seven."""
    on_device(check_counts.check_rounding)


def test_the_host_waits_once_for_a_pass_and_twice_or_less_for_a_draft() -> None:
    """And the planner reckons with what the engine does. If not: python -m tests.gpu.counts --write"""
    on_device(check_counts.check_rounds)
