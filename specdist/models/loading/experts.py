"""Cuts experts over a group of ranks, which DeepSpeed leaves whole: each rank has a part of every expert.

The inner width of an expert is cut, so all ranks run the same experts on the same tokens: their routers,
whole on every rank, choose alike. What the ranks give for a token is summed over them once, after the sum
over its experts. transformers' plans (``base_model_tp_plan``) call that ``moe_tp_experts``.

Experts are the modules that transformers marks for its ``ExpertsInterface``. Their joined parameters have
one of two layouts, and the halves of a gate follow one another, or alternate number by number.

E experts, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

CUTS = "expert_cuts"


@dataclass(frozen=True)
class ExpertsCut:
    """This rank's part of a joined parameter: its ``ranges`` of a dimension, one after the other. None of
    them: the parameter is added once, on the first rank, and is zero on the others."""

    dim: int
    ranges: tuple[range, ...]


def experts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of joined experts, by name."""
    for name, module in model.named_modules():
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
            yield name, module


def cut_experts(model: nn.Module, group: dist.ProcessGroup) -> int:
    """Replace the parameters of all experts, on the meta device, by this rank's part; the number of modules.

    Raises ValueError for experts that are not known here, or whose width the ranks do not divide.
    """
    found = list(experts_of(model))
    for name, module in found:
        shapes = {leaf: weight.shape for leaf, weight in module.named_parameters()}
        cuts = _cuts(name, module, shapes, dist.get_rank(group), dist.get_world_size(group))
        for leaf, cut in cuts.items():
            weight, shape = module.get_parameter(leaf), list(shapes[leaf])
            if cut.ranges:
                shape[cut.dim] = sum(map(len, cut.ranges))
            part = torch.empty(shape, dtype=weight.dtype, device=weight.device)
            setattr(module, leaf, nn.Parameter(part, requires_grad=False))
        setattr(module, CUTS, cuts)
        module.mp_group = group  # type: ignore[assignment]
        module.sum_over_ranks = None  # type: ignore[assignment]
        module.forward = functools.partial(_forward, module, module.forward)
    return len(found)


def cut_of(module: nn.Module, leaf: str) -> ExpertsCut | None:
    """Of a parameter of cut experts; None of any other."""
    cuts: Mapping[str, ExpertsCut] = getattr(module, CUTS, {})
    return cuts.get(leaf)


def _forward(module: Any, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    output = forward(*args, **kwargs)
    if module.sum_over_ranks is not None:
        summed: Tensor = module.sum_over_ranks(output)
        return summed
    if module.mp_group is not None:
        dist.all_reduce(output, group=module.mp_group)
    return output


def _cuts(
    name: str, module: Any, shapes: Mapping[str, torch.Size], rank: int, num_ranks: int
) -> dict[str, ExpertsCut]:
    up = "gate_up_proj" if module.has_gate else "up_proj"
    known = {up, "down_proj", *((f"{up}_bias", "down_proj_bias") if module.has_bias else ())}
    if set(shapes) != known or getattr(module, "has_post_expert_norm", False):
        raise ValueError(f"{name} has {', '.join(sorted(shapes))}, and not {', '.join(sorted(known))} alone")
    # [E, H, up] and [E, inner, H], or [E, up, H] and [E, H, inner].
    up_dim, down_dim = (2, 1) if module.is_transposed else (1, 2)
    width = shapes["down_proj"][down_dim]
    num_parts = shapes[up][up_dim] // width
    if width % num_ranks or shapes[up][up_dim] != num_parts * width:
        raise ValueError(f"{num_ranks} ranks do not divide the {width} numbers within an expert of {name}")
    size = width // num_ranks
    own = range(rank * size, (rank + 1) * size)
    halves = tuple(range(part * width + own.start, part * width + own.stop) for part in range(num_parts))
    if not module.is_concatenated:
        halves = (range(num_parts * own.start, num_parts * own.stop),)
    cuts = {up: ExpertsCut(up_dim, halves), "down_proj": ExpertsCut(down_dim, (own,))}
    if module.has_bias:
        whole = (range(shapes["down_proj_bias"][1]),)
        cuts |= {f"{up}_bias": ExpertsCut(1, halves), "down_proj_bias": ExpertsCut(1, () if rank else whole)}
    return cuts
