"""How often the host waits for the device in a steady round: bounds by rule and policy."""

from __future__ import annotations

import pytest

from tests.gpu import check_waits
from tests.gpu.processes import needs_pretended_device, on_device

pytestmark = needs_pretended_device


@pytest.mark.parametrize("policy", check_waits.POLICIES)
def test_the_host_waits_at_most_twice_on_either_side_under_every_rule(policy: str) -> None:
    on_device(check_waits.check_waits, policy)
