"""Recurrent layers as their kernels and as plain operations run them, at the shapes that people run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.gpu.first_device import Bench
from tests.kernels import plain

# By models: (kernel, heads, numbers of a head, groups, numbers of a state beside them); of the delta rule the
# numbers are a value's, and the others a key's.
STATES = {
    "Falcon-Mamba 7B": ("mamba", 1, 8192, 1, 16),
    "Nemotron-H 8B": ("mamba", 128, 64, 8, 128),
    "Qwen3-Next 80B": ("delta_rule", 32, 128, 32, 128),
}
TINY_STATES = {
    "Falcon-Mamba 7B": (1, 24, 1, 5),
    "Nemotron-H 8B": (4, 6, 2, 8),
    "Qwen3-Next 80B": (2, 6, 2, 8),
}

Outputs = tuple[Tensor, Tensor]


def states(
    bench: Bench, model: str, num_rows: int, num_tokens: int, num_after: int = 1
) -> tuple[Callable[[], Outputs], Callable[[], Outputs], int]:
    """The kernel and its twin on the same numbers, and the bytes of the states, copied, read and written,
    which are kept before the last ``num_after`` tokens."""
    from specdist.kernels import recurrent

    run, name = _run(bench, model, num_rows, num_tokens, num_after), STATES[model][0]
    kernel, twin = getattr(recurrent, name), getattr(plain, name)
    return lambda: run(kernel), lambda: run(twin), 4 * run(_nothing)[1].nbytes


def _nothing(*arguments: Tensor) -> None:
    """Leaves the states as they are."""


def _run(
    bench: Bench, model: str, num_rows: int, num_tokens: int, num_after: int
) -> Callable[[Callable[..., None]], Outputs]:
    """Of an operator on these numbers."""
    name, *sizes = STATES[model]
    heads, width, groups, state_size = TINY_STATES[model] if bench.is_fake else sizes
    num_places = num_rows * num_tokens
    slots, firsts = torch.arange(num_rows).flip(0), torch.arange(0, num_places, num_tokens)
    numbers = (slots, torch.zeros_like(slots), firsts, firsts + num_tokens, firsts + num_tokens - num_after)
    runs = torch.stack(numbers).to(bench.device)
    if name == "mamba":
        state = bench.random(num_rows, heads, width, state_size).float()
        x = bench.random(num_places, heads, width, seed=1)
        steps = bench.random(num_places, width if heads == 1 else heads, seed=2).float().exp()
        of_states = [bench.random(num_places, groups, state_size, seed=seed) for seed in (3, 4)]
        rates = bench.random(*((width, state_size) if heads == 1 else (heads,)), seed=5)
        arguments = [x, steps, *of_states, -rates.float().exp()]
    else:
        state = bench.random(num_rows, heads, state_size, width).float()
        queries, keys, values = (
            bench.random(num_places, heads, size, seed=seed).float()
            for seed, size in enumerate((state_size, state_size, width), start=1)
        )
        keys = keys / keys.norm(dim=-1, keepdim=True)
        logs = -bench.random(num_places, heads, 1, seed=4).float().exp()
        arguments = [queries, keys, values, logs, logs[..., 0].sigmoid()]

    def run(operator: Callable[..., None]) -> Outputs:
        held, output = state.clone(), torch.zeros(num_places, heads, width, device=bench.device)
        operator(output, held, runs, *arguments)
        return output, held

    return run


def largest_share(found: Any, expected: Any) -> float:
    """Of |difference| / (the largest number), over all results."""
    pairs = zip(found, expected, strict=True)
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
