"""Gives each rank of a group its part of the experts, which DeepSpeed leaves whole.

Either the inner width of every expert is cut, so that all ranks run the same experts on the same tokens:
transformers' plans (``base_model_tp_plan``) call that ``moe_tp_experts``. Or every expert is whole on one
rank (expert parallelism), and a rank skips the pairs of a token and another rank's expert. Routers are whole
on every rank and choose alike. What the ranks give for a token is summed over them once, after the sum over
its experts; where a block adds what shared experts give, after that.

Experts are the modules that transformers marks for its ``ExpertsInterface``. Their joined parameters have
one of two layouts, and the halves of a gate follow one another, or alternate number by number.

E experts, H hidden size, T tokens.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdist.models.recurrent.cuts import CUTS, Cut

# Sizes of a probe: tokens; how much larger the second numbers are, which norms and caps would hide; and the
# largest difference of two orders of rounding, relative to the largest number.
PROBE_TOKENS, SECOND, TOLERANCE = 4, 64.0, 2.0**-6

logger = logging.getLogger(__name__)


def experts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of joined experts, by name."""
    for name, module in model.named_modules():
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
            yield name, module


def own_experts(num_experts: int, rank: int, num_ranks: int) -> range:
    """The experts that are whole on a rank; nearly as many on each."""
    return range(rank * num_experts // num_ranks, (rank + 1) * num_experts // num_ranks)


def cut_experts(model: nn.Module, group: dist.ProcessGroup, *, is_expert_parallel: bool = False) -> int:
    """Replace the parameters of all experts, on the meta device, by this rank's part; the number of modules.
    ``is_expert_parallel``: whole experts, each on one rank.

    Raises ValueError for experts that are not known here, whose width the ranks do not divide, or that are
    fewer than the ranks.
    """
    found = list(experts_of(model))
    if is_expert_parallel and not found:
        raise ValueError("none of its experts are known here")
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    for name, module in found:
        shapes = {leaf: weight.shape for leaf, weight in module.named_parameters()}
        _check_known(name, module, shapes)
        forward = module.forward
        if is_expert_parallel:
            own = _give_whole(name, module, rank, num_ranks)
            cuts = {leaf: Cut(0, (own,)) for leaf in shapes}
            forward = functools.partial(_of_own, module, own, forward)
        else:
            cuts = _cuts(name, module, shapes, rank, num_ranks)
        for leaf, cut in cuts.items():
            weight, shape = module.get_parameter(leaf), list(shapes[leaf])
            if cut.ranges:
                shape[cut.dim] = sum(map(len, cut.ranges))
            part = torch.empty(shape, dtype=weight.dtype, device=weight.device)
            setattr(module, leaf, nn.Parameter(part, requires_grad=False))
        setattr(module, CUTS, cuts)
        _sum_output(module, forward, group)
    return len(found)


def _sum_output(module: Any, forward: Callable[..., Tensor], group: dist.ProcessGroup) -> None:
    """Let the module give the sum over the ranks of what ``forward`` gives on each."""
    module.mp_group = group
    module.sum_over_ranks = None
    module.forward = functools.partial(_forward, module, forward)


def _forward(module: Any, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    output = forward(*args, **kwargs)
    if module.mp_group is None:
        return output
    if module.sum_over_ranks is not None:
        summed: Tensor = module.sum_over_ranks(output)
        return summed
    dist.all_reduce(output, group=module.mp_group)
    return output


def _give_whole(name: str, module: Any, rank: int, num_ranks: int) -> range:
    num_experts = module.num_experts
    if num_experts < num_ranks:
        raise ValueError(f"{num_ranks} ranks are more than the {num_experts} experts of {name}")
    own = own_experts(num_experts, rank, num_ranks)
    module.num_experts, module._is_expert_parallel = len(own), True
    return own


def _of_own(
    module: Any, own: range, forward: Callable[..., Tensor], hidden_TH: Tensor, chosen_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:  # fmt: skip
    """What this rank's experts give for the tokens that choose them."""
    is_own_TK = (chosen_TK >= own.start) & (chosen_TK < own.stop)
    # Grouped products skip numbers from that of the experts on; transformers' plain loop has none of them.
    skipped = 0 if module.config._experts_implementation == "eager" else len(own)
    own_TK = torch.where(is_own_TK, chosen_TK - own.start, skipped)
    return forward(hidden_TH, own_TK, weights_TK.masked_fill(~is_own_TK, 0))


def _check_known(name: str, module: Any, shapes: Mapping[str, torch.Size]) -> None:
    up = "gate_up_proj" if module.has_gate else "up_proj"
    known = {up, "down_proj", *((f"{up}_bias", "down_proj_bias") if module.has_bias else ())}
    if set(shapes) != known or getattr(module, "has_post_expert_norm", False):
        raise ValueError(f"{name} has {', '.join(sorted(shapes))}, and not {', '.join(sorted(known))} alone")


def _cuts(
    name: str, module: Any, shapes: Mapping[str, torch.Size], rank: int, num_ranks: int
) -> dict[str, Cut]:
    up = "gate_up_proj" if module.has_gate else "up_proj"
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
    cuts = {up: Cut(up_dim, halves), "down_proj": Cut(down_dim, (own,))}
    if module.has_bias:
        whole = (range(shapes["down_proj_bias"][1]),)
        cuts |= {f"{up}_bias": Cut(1, halves), "down_proj_bias": Cut(1, () if rank else whole)}
    return cuts


def share_sums(
    model: PreTrainedModel, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
) -> None:
    """Sum once over the ranks what a block makes of its experts and of shared ones, where a probe finds on
    every rank that it adds them up. A collective of the group."""
    from deepspeed.module_inject.layers import LinearAllreduce

    found = []
    for name, experts in experts_of(model):
        block = model.get_submodule(name.rpartition(".")[0])
        shared = [
            each
            for each in block.modules()
            if type(each) is LinearAllreduce or getattr(each, "sums_over_ranks", False)
        ]
        if shared:
            found.append((block, experts, shared))
    generator, width = torch.Generator().manual_seed(0), model.config.get_text_config().hidden_size
    own = []
    for block, experts, shared in found:
        parts = [experts, *shared]
        numbers = torch.randn(1 + 2 * len(parts), PROBE_TOKENS, width, generator=generator)
        own.append(_adds_up(block, parts, numbers.to(device, dtype)))
    flags = [own] * dist.get_world_size(group)
    dist.all_gather_object(flags, own, group=group)
    adds_up = [all(of_block) for of_block in zip(*flags, strict=True)]
    for (block, experts, shared), does in zip(found, adds_up, strict=True):
        if does:
            for part in (experts, *shared):
                part.mp_group = None
                part.is_summed_later = True
            _sum_output(block, block.forward, group)
    if found:
        logger.info(
            "experts and shared experts: one sum over the ranks in %d of %d blocks", sum(adds_up), len(found)
        )


@torch.inference_mode()
def _adds_up(block: Any, parts: Sequence[Any], hidden_NTH: Tensor) -> bool:
    """Whether the block's output is a sum of terms, each linear in what one of its ``parts`` gives: it is run
    with numbers of ``hidden_NTH`` in their places."""
    if any(getattr(part, "bias", None) is not None for part in parts):
        return False  # added once, after the sum
    hidden_1TH, given_NTH = hidden_NTH[:1], hidden_NTH[1:]
    first, second = given_NTH[: len(parts)], SECOND * given_NTH[len(parts) :]
    forwards = [vars(part).get("forward") for part in parts]
    try:
        outputs = []
        for values in (first, second, first + second, torch.zeros_like(first)):
            for part, value in zip(parts, values, strict=True):
                part.forward = lambda inputs, *_, value=value: value.view(*inputs.shape[:-1], -1)
            outputs.append(block(hidden_1TH))
        one, other, both, none = (output.float() for output in outputs)
    except Exception:  # a block that takes or gives other things than one tensor
        logger.debug("no probe of %s", type(block).__name__, exc_info=True)
        return False
    finally:
        for part, forward in zip(parts, forwards, strict=True):
            vars(part).pop("forward", None)
            if forward is not None:
                part.forward = forward
    return not none.any() and bool((one + other - both).abs().max() <= TOLERANCE * both.abs().max())
