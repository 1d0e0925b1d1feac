"""The counts of what a device is given: no number is worse than it was, and the planner reckons with them.

Each check runs in a process with a fake device.
"""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from specdist.models.loading.conversions import Piece
from specdist.models.loading.packed_experts import fill_quantized
from specdist.models.passes import products
from specdist.models.quantized.quantized_linear import QuantizedLinear, choose_products
from specdist.models.quantized.quantized_weights import LayerFormat
from specdist.models.sizes.reserve import KERNELS_PER_LAYER, OTHER_KERNELS
from tests.gpu import counts
from tests.gpu.device import DEVICE
from tests.gpu.engine_runs import GPU
from tests.gpu.processes import needs_fake_device, on_device

pytestmark = needs_fake_device


def test_a_layer_has_few_kernels() -> None:
    """Gemma 2 has four norms, and Qwen 3 norms its heads."""
    on_device(check_kernels, {"llama": 10, "gemma2": 10, "qwen3": 12})


def test_a_token_is_rounded_by_one_kernel() -> None:
    """For all layers that read it; in plain operations by six or seven."""
    on_device(check_rounding)


def test_the_host_waits_once_for_a_pass_and_twice_or_less_for_a_draft() -> None:
    """And the planner reckons with what the engine does. If not: python -m tests.gpu.counts --write"""
    on_device(check_rounds)


def check_kernels(most: dict[str, int]) -> None:
    """``most``: kernels of a layer, by family."""
    for family, number in most.items():
        found = counts.kernels_of_family(family)
        assert found["per_layer"] <= min(number, KERNELS_PER_LAYER), (family, found)
        assert found["outside_of_layers"] <= OTHER_KERNELS, (family, found)
    # By the project's kernel, which the activation is in.
    products.MIN_WEIGHTS, seconds = 1, itertools.cycle((2.0, 1.0))
    products._cold_s = lambda _: next(seconds)
    assert counts.kernels_of_family("llama")["per_layer"] == most["llama"] - 1


def check_rounding() -> None:
    """Of an input that three layers read, before and after, and the numbers are the same."""
    for numbers, most in (("float8", 6), ("int8", 7)):
        form = LayerFormat(numbers=numbers, rows=1, columns=None, activations="token")
        layers = nn.ModuleList(QuantizedLinear(form, 32, 48).to_empty(device=GPU) for _ in range(3))
        weight = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
        for layer in layers:
            fill_quantized(layer, Piece.whole("", weight.shape), weight)
        choose_products(layers, torch.bfloat16)
        assert layers[0].last_input.has_kernel
        inputs, rounded, kernels = torch.randn(5, 48).bfloat16().to(GPU), [], []
        for has_kernel in (False, True):
            layers[0].last_input.has_kernel = has_kernel
            own = inputs.clone()
            DEVICE.reset()
            rounded.append([layer._rounded(own, own) for layer in layers])
            kernels.append(DEVICE.counts().num_kernels)
        assert kernels == [most, 1], (numbers, kernels)
        assert torch.equal(rounded[0][2].numbers.float().cpu(), rounded[1][2].numbers.float().cpu())


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
