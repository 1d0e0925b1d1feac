"""What the fake device refuses, counts and replays: the rules that other tests here rely on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu import check_captures, check_rules
from tests.gpu.processes import needs_fake_device, on_device

pytestmark = needs_fake_device

CHECKS = {
    name.removeprefix("check_"): check
    for module in (check_rules, check_captures)
    for name, check in inspect.getmembers(module, inspect.isfunction)
    if name.startswith("check_") and check.__module__ == module.__name__
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_fake_device_follows_the_rules_of_cuda(check: Callable[..., Any]) -> None:
    on_device(check)
