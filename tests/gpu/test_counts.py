"""The counts of what a device is given: no number is worse than it was, and the planner reckons with them.

Each check runs in a process with a fake device.
"""

from __future__ import annotations

import itertools
import json

import pytest

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from specdist.models.passes import products
from specdist.models.sizes.reserve import KERNELS_PER_LAYER, OTHER_KERNELS
from tests.gpu import counts
from tests.gpu.processes import needs_fake_device, on_device

pytestmark = needs_fake_device


def test_a_layer_has_few_kernels() -> None:
    """Gemma 2 has four norms, and Qwen 3 norms its heads. Inputs that are rounded have a kernel for that, of
    each product that is joined or not."""
    on_device(check_kernels, {"llama": 9, "gemma2": 9, "qwen3": 11, counts.MIXTURE: 16})
    on_device(check_kernels, {"FP8, one scale, static inputs": 13, "FP8 per channel, inputs per token": 13})
    on_device(check_products, {"llama": 6, "FP8 per channel, inputs per token": 11})


def test_the_host_waits_once_for_a_pass_and_twice_or_less_for_a_draft() -> None:
    """And the planner reckons with what the engine does. If not: python -m tests.gpu.counts --write"""
    on_device(check_rounds)


def check_kernels(most: dict[str, int]) -> None:
    """``most``: kernels of a layer, by family, or by layout of a stored Llama."""
    for family, number in most.items():
        found = counts.kernels_of_family(family)
        assert found["per_layer"] <= min(number, KERNELS_PER_LAYER), (family, found)
        assert found["outside_of_layers"] <= OTHER_KERNELS, (family, found)


def check_products(expected: dict[str, int]) -> None:
    """By the project's kernel, which the activation, residuals and norms are in."""
    products.MIN_WEIGHTS, seconds = 1, itertools.cycle((2.0, 1.0))
    products._cold_s = lambda _: next(seconds)
    found = {family: counts.kernels_of_family(family)["per_layer"] for family in expected}
    assert found == expected


def check_rounds() -> None:
    """The host waits for what is verified once, and once for what the draft has drawn; twice or less on
    average if the policy may go on after a run of steps, or decides for a batch of which it must know the
    next tokens."""
    plain, with_head = counts.Rounds(), counts.Rounds(has_head=True)
    check_planned(plain)
    for rounds, rule, policy, most in (
        (plain, "gumbel", "fixed", 1),
        (plain, "greedy", "goodput", 2),
        (with_head, "top_p", "specdecpp", 2),
    ):
        waits = counts.syncs_of(rounds, rule, policy)
        assert max(waits["target"]) <= 1, (rule, policy, waits)
        assert sum(waits["draft"]) / len(waits["draft"]) <= most, (rule, policy, waits)


def check_planned(rounds: counts.Rounds) -> None:
    """The planner promises nothing that the engine does not do: its numbers are those of the engine, or
    worse. Means over rounds differ a little with what is accepted."""
    found, planned = counts.planned(rounds), json.loads(counts.PLANNED.read_text(encoding="utf-8"))
    for side, numbers in found.items():
        for name, number in numbers.items():
            assert planned[side][name] >= number - 0.05, f"{side}, {name}: {found}"
