"""Inputs of quantised layers as numbers of their format, with a scale for each token, each group of columns,
or all.

T tokens, K inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdist.models.quantized.quantized_weights import LIMITS, LayerFormat, rounded
from specdist.utils.trial import check_difference

TRIAL_TOKENS = 5
# Tolerances of scales, and the share of numbers that may be the next one: where it is to divide by a number,
# torch multiplies by its inverse on CUDA.
SCALE_TOLERANCE, MOST_MOVED = 1e-6, 0.01


class RoundedInput(NamedTuple):
    """Numbers of a layer's format [T, K], and their scales."""

    numbers: Tensor
    scales: Tensor


def round_tokens(form: LayerFormat, x_TK: Tensor, scale: float | None) -> RoundedInput:
    """Round tokens with a scale for each, or with a stored one, by the project's kernel. Raises ValueError
    for tokens too wide for it."""
    # Triton is not everywhere.
    from specdist.kernels.rounding import rounded_rows

    is_float8 = form.numbers == "float8"
    return RoundedInput(*rounded_rows(x_TK, limit=LIMITS[form.numbers], is_float8=is_float8, scale=scale))


def check_kernel(
    form: LayerFormat, device: torch.device, dtype: torch.dtype, width: int, scale: float | None = None
) -> None:
    """Raises ValueError if the kernel rounds tokens to other numbers than plain operations do."""
    generator = torch.Generator().manual_seed(0)
    x_TK = torch.randn(TRIAL_TOKENS, width, generator=generator).to(device, dtype)
    scales = input_scales(form, x_TK, None if scale is None else torch.tensor([scale], device=device))
    assert scales is not None
    found = round_tokens(form, x_TK, scale)
    off = float((found.scales / scales - 1).abs().max())
    check_difference("scales of tokens differ", off, SCALE_TOLERANCE)
    moved = float((found.numbers.float() != rounded_inputs(form, x_TK, scales).float()).float().mean())
    check_difference("numbers of tokens differ in a share", moved, MOST_MOVED)


def input_scales(form: LayerFormat, x_TK: Tensor, static: Tensor | None = None) -> Tensor | None:
    """Scales of each token [T, 1], of its groups [T, B], or of all [1, 1]: float32. None if no inputs are
    rounded."""
    if form.activations is None:
        return None
    if form.activations == "static":
        assert static is not None
        return static.reshape(1, 1)
    if form.activations == "group":
        largest = _largest(_grouped(x_TK, form.columns))[..., 0]
    else:
        largest = _largest(x_TK)
    # A token of zeros alone: any scale will do.
    return (largest / LIMITS[form.numbers]).clamp_min(torch.finfo(torch.float32).tiny)


def _largest(x: Tensor) -> Tensor:
    """Magnitude along the last dimension, which stays: float32, in one kernel."""
    found: Tensor = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True, dtype=torch.float32)
    return found


def rounded_inputs(form: LayerFormat, x_TK: Tensor, scales: Tensor) -> Tensor:
    """[T, K] numbers of the format."""
    if form.activations == "group":
        scaled = (_grouped(x_TK.float(), form.columns) / scales[..., None]).flatten(1)
        return rounded(scaled[:, : x_TK.shape[1]], form.numbers)
    return rounded(x_TK / scales, form.numbers)


def rounded_values(
    form: LayerFormat, x_TK: Tensor, static: Tensor | None = None, sizes: tuple[int, ...] = ()
) -> Tensor:
    """The inputs as their rounded numbers mean them, in their own dtype; ``sizes``: of the ranks' parts,
    each with scales of its own."""
    found = []
    for part in x_TK.split(sizes or x_TK.shape[1], dim=1):
        scales = input_scales(form, part, static)
        assert scales is not None
        rounded_part = RoundedInput(rounded_inputs(form, part, scales), scales)
        found.append(values_of(form, rounded_part, x_TK.dtype))
    return torch.cat(found, dim=1)


def values_of(form: LayerFormat, found: RoundedInput, dtype: torch.dtype) -> Tensor:
    """[T, K]: what rounded inputs mean."""
    values, scales = found.numbers.float(), found.scales
    if form.activations == "group":
        values = (_grouped(values, form.columns) * scales[..., None]).flatten(1)[:, : values.shape[1]]
    else:
        values = values * scales
    return values.to(dtype)


def _grouped(x_TK: Tensor, columns: int | None) -> Tensor:
    """[T, B, columns], the last filled up with zeros."""
    width = columns or x_TK.shape[1]
    padding = -x_TK.shape[1] % width
    return (
        F.pad(x_TK, (0, padding)).unflatten(-1, (-1, width)) if padding else x_TK.unflatten(-1, (-1, width))
    )
