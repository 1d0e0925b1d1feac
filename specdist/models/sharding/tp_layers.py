"""Puts the layers of one rank into a model on the meta device, as a plan says.

The linear layers are DeepSpeed's, and so are the sizes of feed-forward parts: nearly equal pieces. Attention
is cut here, by heads: key/value heads that are fewer than the ranks are held by several, each by as many. A
norm over the outputs of all ranks is here, too: its mean of squares is summed over them.

T tokens, W width on this rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_tp import AutoTP
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer
from deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size_list
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specdist.models.passes.fusing_trials import differences, twin_of
from specdist.models.recurrent.cuts import (
    COLWISE,
    CUTS,
    EQUAL,
    GRAIN,
    NORM,
    PACKED,
    ROWWISE,
    TURNED,
    Cut,
    PlannedCut,
)
from specdist.models.recurrent.kinds import mixers_of
from specdist.models.sharding.tp_plan import EXPERTS, WHOLE
from specdist.utils.ranges import range_of_part

LINEAR = (nn.Linear, Conv1D)
# The cut of a feed-forward part.
NEARLY_EQUAL = AutoTPMeta(tp_grain_size=GRAIN)
# What attention calls its key/value heads.
KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "num_kv")
# A trial of a norm's formula, in bfloat16: rows, and a few last places.
TRIAL_ROWS, TOLERANCE = 64, 2.0**-6


def place_cut_layers(
    model: PreTrainedModel, cuts: Mapping[str, PlannedCut], group: dist.ProcessGroup
) -> None:
    """Replace what is cut, but for experts. Raises ValueError for what cannot be, by its name."""
    num_ranks = dist.get_world_size(group)
    autotp = AutoTP(model, (), "", None, None, None)
    autotp.tp_meta = equal = AutoTPMeta(num_kv_heads=num_ranks, tp_grain_size=GRAIN)
    autotp.set_tensor_parallel_config(num_ranks, group)
    experts = tuple(f"{name}." for name, cut in cuts.items() if cut.style == EXPERTS)
    for name, mixer in mixers_of(model).items():
        if mixer.num_pieces % num_ranks:
            raise ValueError(f"{name} can be cut into {mixer.num_pieces} equal pieces at most")
    owners: dict[str, Any] = {}
    repeats: dict[str, int] = {}
    for name, cut in cuts.items():
        if cut.style in WHOLE or name.startswith(experts):
            continue
        owner_name, _, last = name.rpartition(".")
        owner = owners.setdefault(owner_name, model.get_submodule(owner_name))
        part, style = getattr(owner, last), cut.style
        repeats[owner_name] = max(repeats.get(owner_name, 1), cut.num_repeats(num_ranks))
        if isinstance(part, LINEAR) and (style == COLWISE or (style == PACKED and cut.parts)):
            setattr(owner, last, ColumnLinear(part, group, cut))
        elif isinstance(part, LINEAR) and style == ROWWISE:
            meta = equal if cut.is_of_heads else NEARLY_EQUAL
            summed = LinearAllreduce(linear_of(part), group, name="", tp_meta=meta)
            if isinstance(part, Conv1D):
                own = range_of_part(summed._partition_sizes, dist.get_rank(group))
                vars(summed).update({CUTS: {"weight": Cut(0, (own,))}, TURNED: True})
            setattr(owner, last, summed)
        elif isinstance(part, nn.Module) and style == NORM:
            setattr(owner, last, NormOverRanks(part, group, cut, name))
        elif style == EQUAL or (isinstance(part, nn.Parameter) and style == COLWISE):
            cut_equally(owner if isinstance(part, nn.Parameter) else part, last, cut.parts, group)
        else:
            raise ValueError(
                f"the plan cuts {name}, a {type(part).__name__}, by {style!r}, which is not known here"
            )
        if style == PACKED and len(cut.parts) == 3 and hasattr(getattr(owner, "config", None), KV_COUNTS[0]):
            owner.config = LocalConfig(owner.config, num_ranks)
    for name, owner in owners.items():
        for count in KV_COUNTS:
            if hasattr(owner, count):
                setattr(owner, count, getattr(owner, count) * repeats[name])
        # The numbers of heads that its code reads.
        autotp.update_mp_params(owner, name.rpartition(".")[2])
        if hasattr(owner, "split_size"):  # GPT-2's, beside the number that it has from there
            owner.split_size = owner.embed_dim


def own_ranges(cut: PlannedCut, width: int, rank: int, num_ranks: int) -> tuple[range, ...]:
    """A rank's outputs, of ``width`` in all: of each joined part. Several ranks hold a key/value head if
    there are fewer of them than ranks.

    Raises ValueError for heads that cannot be shared out.
    """
    found = []
    parts = cut.parts or (width,)
    for begin, part in zip(itertools.accumulate(parts, initial=0), parts, strict=False):
        if not cut.is_of_heads:
            found.append(range_of_part(get_shard_size_list(part, num_ranks, NEARLY_EQUAL), rank, begin))
            continue
        is_query = len(parts) > 1 and not found
        repeats = 1 if is_query else cut.num_repeats(num_ranks)
        size, rest = divmod(part * repeats, num_ranks)
        if rest:
            raise ValueError(f"{num_ranks} ranks do not divide {part} numbers of heads")
        begin += rank // repeats * size
        found.append(range(begin, begin + size))
    return tuple(found)


def cut_equally(owner: Any, name: str, parts: tuple[int, ...], group: dist.ProcessGroup) -> None:
    """Keep an equal piece of a bare parameter, or of all parameters of a convolution, along their first
    dimension that is longer than one, and where it joins ``parts`` of each of them."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    found = vars(owner).setdefault(CUTS, {})
    for leaf in [name] if name in owner._parameters else [*owner._parameters]:
        whole = owner._parameters[leaf]
        if whole is None:
            continue
        dim = next(dim for dim, length in enumerate(whole.shape) if length > 1)
        widths = parts or (whole.shape[dim],)
        begins = [0, *itertools.accumulate(widths)]
        ranges = tuple(
            range(begin + width * rank // size, begin + width * (rank + 1) // size)
            for begin, width in zip(begins, widths, strict=False)
        )
        own = torch.cat([whole.detach().narrow(dim, each.start, len(each)) for each in ranges], dim)
        setattr(owner, leaf, nn.Parameter(own, requires_grad=False))
        found[leaf] = Cut(dim, ranges)


class ColumnLinear(LinearLayer):
    """A linear layer with this rank's ranges of the outputs. GPT-2's layers are stored transposed."""

    is_plain_product = True

    def __init__(self, whole: nn.Module, group: dist.ProcessGroup, cut: PlannedCut) -> None:
        linear = linear_of(whole)
        ranges = own_ranges(cut, linear.out_features, dist.get_rank(group), dist.get_world_size(group))
        self._ranges, is_turned = ranges, linear is not whole
        super().__init__(linear, group)
        setattr(self, CUTS, {"weight": Cut(1 if is_turned else 0, ranges), "bias": Cut(0, ranges)})
        setattr(self, TURNED, is_turned)

    def _freeze_partition_sizes(self, total_size: int) -> None:
        """The sizes of DeepSpeed's parts have no use here."""

    def _mark_uc_metadata(self) -> None:
        """Nor has what it notes for its checkpoints."""

    @torch.no_grad()
    def _tp_partition(self, parameters: Sequence[nn.Parameter | None]) -> None:
        for parameter in parameters:
            if parameter is not None:
                parameter.data = torch.cat([parameter.data[own.start : own.stop] for own in self._ranges])


def linear_of(whole: nn.Module) -> nn.Linear:
    """A linear layer, or one on the meta device in the place of a transposed layer."""
    if isinstance(whole, nn.Linear):
        return whole
    assert isinstance(whole, Conv1D)
    linear = nn.Linear(whole.nx, whole.nf, device="meta", dtype=whole.weight.dtype)
    for parameter in linear.parameters():
        parameter.requires_grad_(False)
    return linear


class LocalConfig:
    """A configuration with this rank's heads, for attention that slices its joined projections by it."""

    def __init__(self, whole: Any, num_ranks: int) -> None:
        self._whole = whole
        self.num_attention_heads = whole.num_attention_heads // num_ranks
        self.num_key_value_heads = max(1, whole.num_key_value_heads // num_ranks)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_whole"], name)


class NormOverRanks(nn.Module):
    """An RMS norm over numbers of which each rank has some: the weight is cut, the mean is that of all.

    Raises ValueError if the whole one has another formula.
    """

    def __init__(self, whole: nn.Module, group: dist.ProcessGroup, cut: PlannedCut, name: str) -> None:
        super().__init__()
        weight = whole.weight
        assert isinstance(weight, Tensor)
        self.whole_width = len(weight)
        self.epsilon = float(getattr(whole, "variance_epsilon", getattr(whole, "eps", torch.nan)))
        self.mp_group: dist.ProcessGroup | None = None
        self.rounds_first = self._rounds_first(whole, name)
        self.mp_group = group
        num_ranks = dist.get_world_size(group)
        (own,) = own_ranges(cut, len(weight), dist.get_rank(group), num_ranks)
        # Each rank has all numbers of heads that several ranks have.
        self.whole_width *= cut.num_repeats(num_ranks)
        vars(self)[CUTS] = {"weight": Cut(0, (own,))}
        self.weight = nn.Parameter(weight.detach()[own.start : own.stop], requires_grad=False)

    def forward(self, inputs_TW: Tensor) -> Tensor:
        numbers_TW = inputs_TW.float()
        squares_T1 = numbers_TW.square().sum(-1, keepdim=True)
        if self.mp_group is not None:
            dist.all_reduce(squares_T1, group=self.mp_group)
        normed_TW = numbers_TW * torch.rsqrt(squares_T1 / self.whole_width + self.epsilon)
        if self.rounds_first:
            return self.weight * normed_TW.to(inputs_TW.dtype)
        return (self.weight * normed_TW).to(inputs_TW.dtype)

    @torch.no_grad()
    def _rounds_first(self, whole: nn.Module, name: str) -> bool:
        """Whether numbers are rounded before they are multiplied by the weight, found by trying."""
        generator = torch.Generator().manual_seed(0)
        weight, *rows = torch.randn(1 + TRIAL_ROWS, self.whole_width, generator=generator).bfloat16()
        self.weight = nn.Parameter(weight, requires_grad=False)
        twin = twin_of(whole)
        twin._parameters = {"weight": self.weight}
        inputs = torch.stack(rows)
        expected = type(whole).forward(twin, inputs)
        found = {}
        for self.rounds_first in (True, False):
            largest, mean = differences(self(inputs), expected)
            found[self.rounds_first] = mean if largest <= TOLERANCE else torch.inf
        best = min(found, key=found.__getitem__)
        if not found[best] < torch.inf:
            raise ValueError(f"{name} norms all heads by a formula that is not known here")
        return best
