"""Joined experts that stay quantised in memory, whole or one rank's part of each, and their products.

The parameters of a module of experts are replaced by their narrow numbers with scales, and transformers'
``ExpertsInterface`` finds the products here: tokens are sorted by expert, so that each expert that some are
sent to meets its tokens once. Plain numbers are made of one matrix at a time, and kept nowhere.

T tokens, E experts, S tokens sorted by expert, each as often as it has experts, N outputs, K inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from specdist.models.quantized.quantized_linear import TOLERANCES, TRIAL_TOKENS
from specdist.models.quantized.quantized_weights import DTYPES, LayerFormat, QuantizedWeight
from specdist.models.sharding.experts import ExpertsCut
from specdist.utils.trial import Trial, check_difference, first_right

EXPERTS_NAME = "specdist_narrow"
KERNEL = "a kernel of all experts"


class Groups:
    """Tokens that are sorted by expert: ``ids_S`` from 0 to E - 1, or above for experts of other ranks;
    ``dtype``: of the tokens."""

    def __init__(self, ids_S: Tensor, num_experts: int, dtype: torch.dtype) -> None:
        experts_E = torch.arange(num_experts, dtype=ids_S.dtype, device=ids_S.device)
        # Those of expert e end there.
        self.ends_E = torch.searchsorted(ids_S, experts_E, right=True, out_int32=True)
        self._num_tokens, self._dtype = len(ids_S), dtype

    @cached_property
    def blocks(self) -> tuple[Tensor, int]:
        """Of the kernel, for all products of a layer."""
        from specdist.kernels.experts import token_blocks

        return token_blocks(self.ends_E, self._num_tokens, self._dtype)


# Of sorted tokens [S, K]: [S, N], zeros for those of no expert here.
Product = Callable[[Tensor, Groups], Tensor]


class NarrowExperts(nn.Module):
    """In the place of a joined parameter of E matrices [K] → [N], as buffers; on the meta device until it is
    filled.

    Args:
        shape: of this rank's part, as the parameter has it.
        cut: of the whole parameter; None if this rank has all of it.
        is_transposed: the parameter is [E, K, N], and not [E, N, K].
    """

    def __init__(
        self, form: LayerFormat, shape: Sequence[int], cut: ExpertsCut | None, *, is_transposed: bool
    ) -> None:
        super().__init__()
        self.form, self.cut = form, cut
        self.dims = (0, 2, 1) if is_transposed else (0, 1, 2)
        self.num_experts, self.out_features, self.in_features = (shape[dim] for dim in self.dims)
        width = self.in_features // 2 if form.is_halved else self.in_features
        scales = (self.num_experts, *form.num_scales(self.out_features, self.in_features))
        meta = torch.device("meta")
        numbers = torch.empty(
            self.num_experts, self.out_features, width, dtype=DTYPES[form.numbers], device=meta
        )
        self.register_buffer("numbers", numbers)
        self.register_buffer("scales", torch.empty(scales, dtype=form.scale_dtype, device=meta))
        zeros = torch.empty(scales, dtype=torch.int8, device=meta) if form.has_zeros else None
        self.register_buffer("zeros", zeros)
        self.product: Product = self.dequantized_product

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self.buffers())

    def expert(self, index: int) -> QuantizedWeight:
        """A view of its matrix."""
        numbers, scales, zeros = self.numbers, self.scales, self.zeros
        assert isinstance(numbers, Tensor) and isinstance(scales, Tensor)
        zeros_AB = zeros[index] if isinstance(zeros, Tensor) else None
        return QuantizedWeight(self.form, self.in_features, numbers[index], scales[index], zeros_AB)

    @torch.no_grad()
    def fill(self, begin: Sequence[int], whole: QuantizedWeight) -> None:
        """Take what this rank has of rows of one expert, which lie in the whole parameter from ``begin``
        on."""
        whole = whole.spread(self.form)
        sizes = (1, len(whole.numbers), whole.num_inputs)
        for (expert, _, _), (row, top, bottom), (column, left, right) in itertools.product(
            *(self._own(dim, begin[dim], size) for dim, size in zip(self.dims, sizes, strict=True))
        ):
            found = whole.cut(0, top, bottom).cut(1, left, right)
            mine = self.expert(expert).cut(0, row, row + bottom - top)
            mine = mine.cut(1, column, column + right - left)
            mine.numbers.copy_(found.numbers)
            mine.scales_AB.copy_(found.scales_AB)
            if mine.zeros_AB is not None and found.zeros_AB is not None:
                mine.zeros_AB.copy_(found.zeros_AB)

    def _own(self, dim: int, begin: int, length: int) -> list[tuple[int, int, int]]:
        """This rank's parts of what lies at ``begin``: where each begins here, and its ends in it."""
        if self.cut is None or self.cut.dim != dim:
            return [(begin, 0, length)]
        starts = itertools.accumulate(map(len, self.cut.ranges), initial=0)
        ends = [
            (start, own, max(begin, own.start), min(begin + length, own.stop))
            for start, own in zip(starts, self.cut.ranges, strict=False)
        ]
        return [
            (start + first - own.start, first - begin, last - begin)
            for start, own, first, last in ends
            if first < last
        ]

    def dequantized_product(self, x_SK: Tensor, groups: Groups) -> Tensor:
        """What every other product must equal, up to rounding: expert by expert."""
        output_SN, begin = x_SK.new_zeros(len(x_SK), self.out_features), 0
        for index, end in enumerate(groups.ends_E.tolist()):
            if begin < end:
                weight = self.expert(index).dequantized(x_SK.dtype)
                output_SN[begin:end] = F.linear(x_SK[begin:end], weight)
            begin = end
        return output_SN

    def kernel_product(self, x_SK: Tensor, groups: Groups) -> Tensor:
        """Of all experts in one launch, without waiting for the device."""
        from specdist.kernels.experts import grouped_narrow_product

        (blocks_3M, block_tokens), form = groups.blocks, self.form
        output: Tensor = grouped_narrow_product(
            x_SK,
            blocks_3M,
            self.numbers,
            self.scales,
            self.zeros,
            kind=form.numbers,
            rows=form.rows,
            columns=form.columns,
            num_outputs=self.out_features,
            block_tokens=block_tokens,
        )
        return output

    def choose_product(self, dtype: torch.dtype) -> Trial[Product]:
        """Take the kernel where a trial on this device, a GPU, finds it right."""
        assert isinstance(self.numbers, Tensor)
        device, generator = self.numbers.device, torch.Generator().manual_seed(self.in_features)
        x_SK = torch.randn(TRIAL_TOKENS, self.in_features, generator=generator).to(device, dtype)
        ids_S = torch.arange(TRIAL_TOKENS, device=device) * self.num_experts // TRIAL_TOKENS
        groups = Groups(ids_S, self.num_experts, dtype)

        def check(product: Product) -> None:
            expected, found = self.dequantized_product(x_SK, groups), product(x_SK, groups)
            difference = float((found - expected).float().norm() / expected.float().norm())
            check_difference("its numbers differ", difference, TOLERANCES[dtype])

        candidates: dict[str, Callable[[], Product]] = {}
        if device.type == "cuda":
            candidates = {KERNEL: lambda: self.kernel_product}
        trial = first_right(candidates, check)
        self.product = trial.found or self.dequantized_product
        return trial


def narrow_experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Of transformers' ``ExpertsInterface``: [T, H], with each token's experts [T, k] and their weights."""
    num_tokens, num_chosen = top_k_index.shape
    ids_S, order_S = top_k_index.reshape(-1).sort()
    groups = Groups(ids_S, self.num_experts, hidden_states.dtype)

    def product(leaf: str, inputs: Tensor) -> Tensor:
        output: Tensor = getattr(self, leaf).product(inputs, groups)
        if self.has_bias:
            # Numbers past the last one are of experts on other ranks.
            output += getattr(self, f"{leaf}_bias")[ids_S.clamp(max=self.num_experts - 1)]
        return output

    outputs = product(up_name(self), hidden_states[order_S // num_chosen])
    outputs = self._apply_gate(outputs) if self.has_gate else self.act_fn(outputs)
    outputs = product("down_proj", outputs)
    if self.has_post_expert_norm:
        outputs = self.post_expert_norm(outputs)
    weighted = outputs * top_k_weights.reshape(-1)[order_S][:, None]
    in_order = torch.empty_like(weighted)
    in_order[order_S] = weighted
    return in_order.view(num_tokens, num_chosen, -1).sum(dim=1).to(hidden_states.dtype)


ExpertsInterface.register(EXPERTS_NAME, narrow_experts_forward)


def up_name(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def narrow_experts_of(model: nn.Module) -> Iterator[tuple[str, NarrowExperts]]:
    """By the names of the parameters in whose place they are."""
    for name, module in model.named_modules():
        if isinstance(module, NarrowExperts):
            yield name, module
