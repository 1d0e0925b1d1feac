"""The engine in one process on a pretended GPU: the same rows as on a CPU."""

from __future__ import annotations

import pytest

from tests.gpu import check_engine
from tests.gpu.processes import needs_pretended_device, on_device
from tests.models.families import FAMILIES

pytestmark = needs_pretended_device


@pytest.mark.parametrize("family", FAMILIES)
def test_families_under_all_rules(family: str) -> None:
    on_device(check_engine.check_family, family)


@pytest.mark.parametrize("mode", ["in turns", "branches"])
def test_heads(mode: str) -> None:
    on_device(check_engine.check_heads, mode)
