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


def test_preemption() -> None:
    on_device(check_engine.check_preemption)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_damaged_rows(dtype: str) -> None:
    on_device(check_engine.check_damaged_rows, dtype)


def test_out_of_memory() -> None:
    on_device(check_engine.check_out_of_memory)


@pytest.mark.parametrize("mode", ["in turns", "branches"])
def test_heads(mode: str) -> None:
    on_device(check_engine.check_heads, mode)
