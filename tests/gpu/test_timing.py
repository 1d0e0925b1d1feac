"""Times measured on a device, here a fake one: what measuring costs, and whether times add up."""

from __future__ import annotations

import pytest

from tests.gpu import check_timing
from tests.gpu.processes import needs_fake_device, on_device

pytestmark = needs_fake_device


@pytest.mark.parametrize("rule", ["greedy", "rejection"])
def test_events_add_no_synchronisation(rule: str) -> None:
    on_device(check_timing.check_events_add_no_synchronisation, rule)


def test_measured_passes_wait_for_the_device() -> None:
    on_device(check_timing.check_measurements_wait_for_the_device)


def test_free_memory_is_what_the_allocator_can_give_back() -> None:
    on_device(check_timing.check_free_memory_is_what_the_allocator_can_give_back)
