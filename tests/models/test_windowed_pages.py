"""Passes over windowed layers that have pages of their own, which are NaN before they are written and once
they are given back: the logits of plain forwards, with every attention."""

from __future__ import annotations

import pytest

from specdist.models.passes.runner import Acceleration
from specdist.models.passes.static import StaticPasses
from tests.engine.harness import paged_runner
from tests.models.chunks import MIXED, STEPS, check_rows
from tests.models.families import tiny_model
from tests.models.kernels import PlainKernel
from tests.models.test_compiled import needs_compiler
from tests.models.test_static import SHORT

# Windows in all layers, in every other one with a soft cap, and through an adapter.
FAMILIES = ["mistral", "gemma2", "gpt_neo"]
WAYS = {
    "ragged": Acceleration(),
    "static": Acceleration(is_static=True),
    "kernel": Acceleration(kernels=[PlainKernel()]),
    "static with a kernel": Acceleration(is_static=True, kernels=[PlainKernel()]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_plain_forwards(family: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdist.models.passes.static.MIN_KEYS", 8)
    monkeypatch.setattr("specdist.models.passes.static.KEYS_FACTOR", 2)
    ran, compute = [], StaticPasses.compute

    def noted(self: StaticPasses, bucket: object) -> object:
        ran.append(bucket)
        return compute(self, bucket)  # type: ignore[arg-type]

    monkeypatch.setattr(StaticPasses, "compute", noted)
    plain = tiny_model(family)
    for schedule in (SHORT, MIXED):
        check_rows(plain, paged_runner(plain, WAYS[way]), schedule, is_windowed=True)
    assert bool(ran) is WAYS[way].is_static


@needs_compiler
def test_compiled_layers_read_their_own_pages() -> None:
    plain = tiny_model("mistral")
    runner = paged_runner(plain)
    assert runner.compiled is not None
    for schedule in (STEPS, SHORT, MIXED):
        check_rows(plain, runner, schedule, is_windowed=True)
