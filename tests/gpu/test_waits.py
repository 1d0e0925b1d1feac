"""How often the host waits for the device in a steady round: bounds by rule and policy."""

from __future__ import annotations

import pytest

from tests.gpu import check_waits
from tests.gpu.processes import needs_fake_device, on_device

pytestmark = needs_fake_device


@pytest.mark.parametrize("policy", check_waits.ALL_POLICIES)
def test_the_host_waits_twice_or_less_for_a_draft_and_once_for_a_pass(policy: str) -> None:
    on_device(check_waits.check_waits, policy)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_how_late_a_policy_is_asked_changes_no_row(num_steps: int) -> None:
    on_device(check_waits.check_runs, num_steps)
