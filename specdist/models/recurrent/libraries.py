"""Functions of other libraries on a GPU, where they are installed and right: long chunks of prompts by
flash-linear-attention (https://github.com/fla-org/flash-linear-attention) and mamba_ssm
(https://github.com/state-spaces/mamba), convolutions by causal-conv1d (https://github.com/Dao-AILab/causal-conv1d).

States are float32 before and after. Each is tried once, on numbers of the model's precision. Of mamba_ssm
``selective_scan_fn`` (Mamba 1) is not asked: it takes no state from before.

T tokens of a sequence, H heads, K width of keys and V of values, P numbers of a head, G groups, N numbers of
a state beside them, C channels, L places, W width.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor

from specdist.models.recurrent.kernels import one_by_one_delta_rule, one_by_one_mamba
from specdist.utils.trial import check_difference, first_right, tolerance_of

# The check's sizes: more than two chunks of either library, and heads that its kernels take.
NUM_TOKENS, NUM_HEADS, WIDTH = 150, 2, 64
MAMBA_CHUNK = 64
# Steps of its channels' and places' addresses.
CONVOLUTION_GRAIN = 8

# A function of a state [1, H, ...], tokens [T, H, ...] and what is of the layer, to outputs and the state
# after.
OnChunk = Callable[..., tuple[Tensor, Tensor]]
Found = TypeVar("Found")

logger = logging.getLogger(__name__)


@functools.cache
def delta_rule_on(device: torch.device, dtype: torch.dtype, is_fine: bool) -> OnChunk | None:
    """Takes queries, keys, values, logarithms of decays [T, H, D] and rates [T, H]; ``is_fine``: D is K."""
    name = "kda.chunk_kda" if is_fine else "gated_delta_rule.chunk_gated_delta_rule"
    module, function = f"fla.ops.{name}".rsplit(".", 1)

    def make() -> OnChunk:
        run = getattr(import_module(module), function)

        def on_chunk(
            state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, logs: Tensor, rates: Tensor
        ) -> tuple[Tensor, Tensor]:
            rounded = (part[None].to(dtype) for part in (queries, keys, values))
            output, after = run(
                *rounded,
                logs[None] if is_fine else logs[None, ..., 0],
                rates[None],
                scale=1.0,
                initial_state=state,
                output_final_state=True,
            )
            return output[0].float(), after

        return on_chunk

    def check(found: OnChunk) -> None:
        random = _Random(device, dtype)
        keys = random(NUM_TOKENS, NUM_HEADS, WIDTH)
        keys = keys / keys.norm(dim=-1, keepdim=True)
        queries, values = (random(NUM_TOKENS, NUM_HEADS, WIDTH) for _ in range(2))
        logs = -random(NUM_TOKENS, NUM_HEADS, WIDTH if is_fine else 1).exp()
        tokens = (queries, keys, values, logs, random(NUM_TOKENS, NUM_HEADS).sigmoid())
        state = random(1, NUM_HEADS, WIDTH, WIDTH)
        _compare(found, one_by_one_delta_rule, state, *tokens, dtype=dtype)

    return _tried(f"delta rule of prompts on {device}", function, make, check)


@functools.cache
def mamba2_on(device: torch.device, dtype: torch.dtype) -> OnChunk | None:
    """Takes x [T, H, P], time steps [T, H], B and C [T, G, N] and the heads' rates [H]."""

    def make() -> OnChunk:
        run = import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined

        def on_chunk(
            state: Tensor, x: Tensor, steps: Tensor, b: Tensor, c: Tensor, rates: Tensor
        ) -> tuple[Tensor, Tensor]:
            output, after = run(
                *(part[None].contiguous() for part in (x, steps)),
                rates,
                *(part[None].contiguous() for part in (b, c)),
                MAMBA_CHUNK,
                initial_states=state,
                return_final_states=True,
                # Otherwise states between chunks are rounded.
                state_dtype=torch.float32,
            )
            return output[0].float(), after.float()

        return on_chunk

    def check(found: OnChunk) -> None:
        random = _Random(device, dtype)
        x, steps = random(NUM_TOKENS, NUM_HEADS, WIDTH).to(dtype), random(NUM_TOKENS, NUM_HEADS).exp()
        b, c = (random(NUM_TOKENS, 1, WIDTH).to(dtype) for _ in range(2))
        state, of_layer = random(1, NUM_HEADS, WIDTH, WIDTH), (-random(NUM_HEADS).exp(),)
        _compare(found, one_by_one_mamba, state, x, steps, b, c, of_layer=of_layer, dtype=dtype)

    return _tried(f"Mamba 2 of prompts on {device}", "mamba_chunk_scan_combined", make, check)


def convolution_on(device: torch.device, dtype: torch.dtype) -> Callable[..., Any] | None:
    """Takes rows [1, C, L], weights [C, W], a bias and the name of an activation, to as many outputs."""
    return tried_convolution(device, dtype) if device.type == "cuda" else None


@functools.cache
def tried_convolution(device: torch.device, dtype: torch.dtype) -> Callable[..., Any] | None:

    def make() -> Callable[..., Any]:
        found: Callable[..., Any] = import_module("causal_conv1d").causal_conv1d_fn
        return found

    def check(found: Callable[..., Any]) -> None:
        random = _Random(device, dtype)
        rows_LC, weight_CW, bias_C = random(20, 16), random(16, 4), random(16)
        expected = torch.nn.functional.conv1d(
            rows_LC.T[None].double(), weight_CW[:, None].double(), bias_C.double(), groups=16
        )
        wanted = torch.nn.functional.silu(expected)
        output = found(rows_LC.to(dtype).T[None], weight_CW.to(dtype), bias_C.to(dtype), activation="silu")
        difference = (output[..., 3:].double() - wanted).abs().max() / wanted.abs().max()
        check_difference("outputs differ", float(difference), tolerance_of("recurrence", dtype))

    return _tried(f"convolutions of recurrent layers on {device}", "causal_conv1d_fn", make, check)


def can_convolve(rows_LC: Tensor, weight_CW: Tensor, activation: str | None) -> bool:
    """Whether the library takes such rows."""
    is_aligned = rows_LC.shape[1] % CONVOLUTION_GRAIN == rows_LC.stride(0) % CONVOLUTION_GRAIN == 0
    return is_aligned and rows_LC.dtype == weight_CW.dtype and activation in (None, "silu", "swish")


class _Random:
    """Numbers of the precision, as float32."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._generator, self._device, self._dtype = torch.Generator().manual_seed(0), device, dtype

    def __call__(self, *shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=self._generator)
        return numbers.to(self._dtype).float().to(self._device)


@torch.inference_mode()
def _compare(
    found: OnChunk, one_by_one: Callable[..., tuple[Tensor, Tensor]], state: Tensor, *tokens: Tensor,
    of_layer: tuple[Tensor, ...] = (), dtype: torch.dtype,
) -> None:  # fmt: skip
    """Compare with one token after the other in float64. Raises ValueError."""
    output, after = found(state.clone(), *tokens, *of_layer)
    of_sequence = (part.double()[None] for part in tokens)
    outputs, states = one_by_one(state.double(), *of_sequence, *(part.double() for part in of_layer))
    if after.dtype != torch.float32:
        raise ValueError(f"its states are {after.dtype}")
    for name, one, other in (("outputs", output, outputs[0]), ("states", after, states[-1])):
        difference = (one.double() - other).abs().max() / other.abs().max()
        check_difference(f"{name} differ", float(difference), tolerance_of("recurrence", dtype))


def _tried(what: str, name: str, make: Callable[[], Found], check: Callable[[Found], None]) -> Found | None:
    trial = first_right({name: make}, check)
    trial.report(logger, what, "our own", otherwise_level=logging.INFO)
    return trial.found
