"""Puts the layers of one rank into a model on the meta device, as a plan says.

The linear layers are DeepSpeed's, and so are their sizes: attention by key/value heads, feed-forward parts in
nearly equal pieces. A norm over the outputs of all ranks is here: its mean of squares is summed over them.

T tokens, W width on this rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_tp import AutoTP
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, SubParamColumnParallel
from deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size_list
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdist.models.loading.experts import CUTS, ExpertsCut
from specdist.models.loading.tp_plan import EXPERTS, GRAIN, WHOLE
from specdist.models.passes.fusing_trials import differences, twin_of
from specdist.models.recurrent.cuts import COLWISE, EQUAL, NORM, PACKED, ROWWISE, PlannedCut
from specdist.models.recurrent.kinds import mixers_of
from specdist.utils.ranges import range_of_part

# Of a trial of a norm's formula, in bfloat16: a few last places.
TRIAL_ROWS, TOLERANCE = 64, 2.0**-6


def place_cut_layers(
    model: PreTrainedModel, cuts: Mapping[str, PlannedCut], group: dist.ProcessGroup
) -> None:
    """Replace what is cut, but for experts. Raises ValueError for what cannot be, by its name."""
    config = model.config.get_text_config()
    autotp = AutoTP(model, (), "", None, None, None, model_config=config, tp_grain_size=GRAIN)
    autotp.set_tensor_parallel_config(dist.get_world_size(group), group)
    experts = tuple(f"{name}." for name, cut in cuts.items() if cut.style == EXPERTS)
    for name, mixer in mixers_of(model).items():
        if mixer.num_pieces % dist.get_world_size(group):
            raise ValueError(f"{name} has {mixer.num_pieces} heads of keys, or channels")
    owners: dict[str, Any] = {}
    for name, cut in cuts.items():
        if cut.style in WHOLE or name.startswith(experts):
            continue
        owner_name, _, last = name.rpartition(".")
        owner = owners.setdefault(owner_name, model.get_submodule(owner_name))
        where: dict[str, Any] = {"name": f"{owner_name.rpartition('.')[2]}.{last}", "tp_meta": autotp.tp_meta}
        part = getattr(owner, last)
        if isinstance(part, nn.Linear) and cut.style == COLWISE:
            setattr(owner, last, LinearLayer(part, group, **where))
        elif isinstance(part, nn.Linear) and cut.style == ROWWISE:
            setattr(owner, last, LinearAllreduce(part, group, **where))
        elif isinstance(part, nn.Linear) and cut.style == PACKED and cut.parts:
            setattr(owner, last, JoinedLinear(part, group, cut.parts, **where))
            if len(cut.parts) == 3 and hasattr(owner, "config"):
                owner.config = LocalConfig(owner.config, dist.get_world_size(group))
        elif isinstance(part, nn.Module) and cut.style == NORM:
            setattr(owner, last, NormOverRanks(part, group, **where))
        elif cut.style == EQUAL:
            cut_equally(owner if isinstance(part, nn.Parameter) else part, last, cut.parts, group)
        elif isinstance(part, nn.Parameter) and cut.style == COLWISE:
            rows = Rows(len(part), group, **where)
            setattr(owner, last, nn.Parameter(rows.of(part), requires_grad=False))
            owner._tp_partition = rows.keep
        else:
            raise ValueError(
                f"the plan cuts {name}, a {type(part).__name__}, by {cut.style!r}, which is not known here"
            )
    for name, owner in owners.items():
        # The numbers of heads that its code reads.
        autotp.update_mp_params(owner, name.rpartition(".")[2])


class Rows:
    """Which of ``num_rows`` are on this rank."""

    def __init__(self, num_rows: int, group: dist.ProcessGroup, *, name: str, tp_meta: AutoTPMeta) -> None:
        sizes = get_shard_size_list(num_rows, dist.get_world_size(group), tp_meta, name)
        own = range_of_part(sizes, dist.get_rank(group))
        self._own = slice(own.start, own.stop)

    def of(self, whole: Tensor) -> Tensor:
        return whole.detach()[self._own]

    @torch.no_grad()
    def keep(self, parameters: Sequence[nn.Parameter | None]) -> None:
        """Cut in place, as DeepSpeed's layers do it."""
        for parameter in parameters:
            if parameter is not None:
                parameter.data = self.of(parameter.data)


def cut_equally(owner: Any, name: str, parts: tuple[int, ...], group: dist.ProcessGroup) -> None:
    """Of a bare parameter, or of all parameters of a convolution: an equal piece of their first dimension
    that is longer than one, and where it joins ``parts`` of each of them."""
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
        found[leaf] = ExpertsCut(dim, ranges)


class JoinedLinear(SubParamColumnParallel):
    """Joined projections: this rank has its piece of each."""

    def __init__(
        self, whole: nn.Linear, group: dist.ProcessGroup, parts: tuple[int, ...], **where: Any
    ) -> None:
        self._subparam_layout_spec = (parts, where["name"])
        super().__init__(whole, group, **where)


class LocalConfig:
    """A configuration with this rank's heads, for attention that slices its joined projections by it."""

    def __init__(self, whole: Any, num_ranks: int) -> None:
        self._whole = whole
        self.num_attention_heads = whole.num_attention_heads // num_ranks
        self.num_key_value_heads = whole.num_key_value_heads // num_ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_whole"], name)


class NormOverRanks(nn.Module):
    """An RMS norm over numbers of which each rank has some: the weight is cut, the mean is that of all.

    Raises ValueError if the whole one has another formula.
    """

    def __init__(self, whole: nn.Module, group: dist.ProcessGroup, **where: Any) -> None:
        super().__init__()
        weight = whole.weight
        assert isinstance(weight, Tensor)
        self.whole_width = len(weight)
        self.epsilon = float(getattr(whole, "variance_epsilon", getattr(whole, "eps", torch.nan)))
        self.mp_group: dist.ProcessGroup | None = None
        self.rounds_first = self._rounds_first(whole, where["name"])
        self.mp_group = group
        rows = Rows(len(weight), group, **where)
        self._tp_partition = rows.keep
        self.weight = nn.Parameter(rows.of(weight), requires_grad=False)

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
