"""Kernels of recurrent layers, where a device runs them rightly: tried once.

They take one token after the other, in one launch: of a prompt plain operations take 41 for 64 tokens (the
delta rule; with decays of single numbers for 16), or 30 (Mamba 2).

S sequences, H heads, N places that are run.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specdist.utils.trial import check_difference, first_right

# The tolerance of the check: sums in another order, in units of the largest number.
TOLERANCE = 1e-4

logger = logging.getLogger(__name__)

Operator = Callable[..., None]


class Kernels(NamedTuple):
    """The kernels of :mod:`specdist.kernels.recurrent`."""

    mamba: Operator
    delta_rule: Operator


@functools.cache
def kernels_on(device: torch.device) -> Kernels | None:
    """The kernels for a device; None where plain operations are used."""
    if device.type != "cuda":
        return None
    trial = first_right({"Triton kernels": _kernels}, lambda kernels: check(kernels, device))
    trial.report(logger, f"recurrent layers on {device}", "plain operations, of which no pass is recorded")
    return trial.found


def _kernels() -> Kernels:
    # Triton is not everywhere.
    from specdist.kernels.recurrent import delta_rule, mamba

    return Kernels(mamba, delta_rule)


@torch.inference_mode()
def check(kernels: Kernels, device: torch.device) -> None:
    """Against one token after the other in float64, on widths that no block divides. Raises ValueError."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    # Three tokens of each sequence, after a place that nobody runs.
    slots_S, borders_S, firsts_S = torch.tensor([3, 0, 2]), torch.tensor([0, 2, 3]), torch.arange(1, 13, 4)
    runs = torch.stack((slots_S, torch.zeros_like(slots_S), firsts_S, firsts_S + 3, firsts_S + borders_S))
    tokens_SL = firsts_S[:, None] + torch.arange(3)
    mamba2 = [random(12, 4, 5), random(12, 4).exp(), *random(2, 12, 2, 6)]
    mamba1 = [random(12, 1, 5), random(12, 5).exp(), *random(2, 12, 1, 6)]
    keys = random(12, 4, 6)
    delta = [random(12, 4, 6), keys / keys.norm(dim=-1, keepdim=True), random(12, 4, 5)]
    fine, rates = -random(12, 4, 6).exp(), random(12, 4).sigmoid()
    for kernel, state, tokens, of_layer, one_by_one in (
        (kernels.mamba, random(4, 4, 5, 6), mamba2, [-random(4).exp()], one_by_one_mamba),
        (kernels.mamba, random(4, 1, 5, 6), mamba1, [-random(5, 6).exp()], one_by_one_mamba),
        (kernels.delta_rule, random(4, 4, 6, 5), [*delta, fine[..., :1], rates], [], one_by_one_delta_rule),
        (kernels.delta_rule, random(4, 4, 6, 5), [*delta, fine, rates], [], one_by_one_delta_rule),
    ):
        held, found = (
            state.to(device, copy=True),
            torch.full((12, *state.shape[1:2], 5), torch.nan, device=device),
        )
        kernel(found, held, *(each.to(device) for each in (runs, *tokens, *of_layer)))
        of_sequences = (state[slots_S], *(each[tokens_SL] for each in tokens), *of_layer)
        outputs, states = one_by_one(*(each.double() for each in of_sequences))
        kept = states[borders_S, torch.arange(3)]
        for name, one, other in (
            ("outputs", found.cpu()[tokens_SL], outputs),
            ("states", held.cpu()[slots_S], kept),
        ):
            difference = (one.double() - other).abs().max() / other.abs().max()
            check_difference(f"{name} differ", float(difference), TOLERANCE)


def one_by_one_mamba(
    state: Tensor, x: Tensor, steps: Tensor, b: Tensor, c: Tensor, rates: Tensor
) -> tuple[Tensor, Tensor]:
    """Run sequences [S, L, ...]: outputs, and the states after 0, 1, ... tokens."""
    states, outputs = [state], []
    for step, of_x, of_b, of_c in zip(*(each.unbind(1) for each in (steps, x, b, c)), strict=True):
        repeats = of_x.shape[1] // of_b.shape[1]
        of_b, of_c = (each.repeat_interleave(repeats, 1)[:, :, None] for each in (of_b, of_c))
        # Steps of heads; or of the numbers of the only one.
        step, rate = (step[:, :, None], rates[:, None, None]) if rates.dim() == 1 else (step[:, None], rates)
        state = state * (step[..., None] * rate).exp() + (step * of_x)[..., None] * of_b
        states.append(state)
        outputs.append((state * of_c).sum(-1))
    return torch.stack(outputs, 1), torch.stack(states)


def one_by_one_delta_rule(
    state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, logs: Tensor, rates: Tensor
) -> tuple[Tensor, Tensor]:
    """The same of the delta rule."""
    states, outputs = [state], []
    parts = (each.unbind(1) for each in (queries, keys, values, logs, rates[..., None]))
    for query, key, value, log, rate in zip(*parts, strict=True):
        state = state * log.exp()[..., None]
        correction = rate * (value - (state * key[..., None]).sum(-2))
        state = state + key[..., None] * correction[..., None, :]
        states.append(state)
        outputs.append((state * query[..., None]).sum(-2))
    return torch.stack(outputs, 1), torch.stack(states)
