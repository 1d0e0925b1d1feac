"""The counts of what a device is given: no number is worse than it was, and the planner reckons with them.

Each check runs in a process with a fake device.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from specdist.models.passes import products
from specdist.models.sizes.reserve import KERNELS_PER_LAYER, OTHER_KERNELS
from tests.gpu import counts
from tests.gpu.engine_runs import MAX_DRAFT_TOKENS, policies
from tests.gpu.processes import needs_fake_device, on_device

pytestmark = needs_fake_device


def test_a_layer_has_few_kernels() -> None:
    """Gemma 2 has four norms, and Qwen 3 norms its heads. Inputs that are rounded have a kernel for that, of
    each product that is joined or not."""
    on_device(check_kernels)


def test_the_host_waits_once_for_a_pass_and_twice_or_less_for_a_draft() -> None:
    """And the planner reckons with what the engine does. If not: python -m tests.gpu.counts --write"""
    on_device(check_rounds)


def check_kernels() -> None:
    """By family, or by layout of a stored Llama; then by the project's kernel for products, which the
    activation, residuals and norms are in."""
    of_fp8 = {"FP8, one scale, static inputs": 13, "FP8 per channel, inputs per token": 13}
    for family, number in {"llama": 9, "gemma2": 9, "qwen3": 11, counts.MIXTURE: 16, **of_fp8}.items():
        found = counts.kernels_of_family(family)
        assert found["per_layer"] <= min(number, KERNELS_PER_LAYER), (family, found)
        assert found["outside_of_layers"] <= OTHER_KERNELS, (family, found)
    products.MIN_WEIGHTS, seconds = 1, itertools.cycle((2.0, 1.0))
    products._cold_s = lambda _: next(seconds)
    for family, number in {"llama": 6, "FP8 per channel, inputs per token": 11}.items():
        assert counts.kernels_of_family(family)["per_layer"] == number, family


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
    # Runs of one step, with next tokens; the target's own copies are its inputs, the candidates and what it
    # says of them.
    found = plain.steady("rejection", policies(MAX_DRAFT_TOKENS)["goodput"])
    for side, most_copies, most_kernels in (("target", 3, 3), ("draft", 4.2, 12)):
        total = sum((each[side] for each in found), Counter[str]())
        assert total["copies"] <= most_copies * len(found), (side, total, len(found))
        assert total["eager kernels"] <= most_kernels * len(found), (side, total, len(found))


def check_planned(rounds: counts.Rounds) -> None:
    """The planner promises nothing that the engine does not do: its numbers are those of the engine, or
    worse. Means over rounds differ a little with what is accepted."""
    found, planned = counts.planned(rounds), json.loads(counts.PLANNED.read_text(encoding="utf-8"))
    for side, numbers in found.items():
        for name, number in numbers.items():
            assert planned[side][name] >= number - 0.05, f"{side}, {name}: {found}"
