"""Packed experts: joined experts that stay quantised in memory, whole or one rank's part of each.

The parameters of a module of experts are replaced by their quantised numbers with scales, and transformers'
``ExpertsInterface`` finds the products here: tokens are sorted by expert, so that each expert that some are
sent to meets its tokens once. One matrix at a time is dequantised, and kept nowhere. What cannot stay packed
(a cut through a byte of two numbers, experts that are quantised in several ways, an order of their parts that
is not known here) is dequantised while it is read, and the log says why.

T tokens, E experts, S tokens sorted by expert, each as often as it has experts, N outputs, K inputs.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, _grouped_linear

from specdist.models.loading.conversions import Piece
from specdist.models.quantized.quantized_linear import TRIAL_TOKENS, QuantizedLinear
from specdist.models.quantized.quantized_weights import DTYPES, LayerFormat, QuantizedWeight
from specdist.models.recurrent.cuts import Cut, cut_of
from specdist.models.sharding.experts import experts_of
from specdist.utils.host import GIB
from specdist.utils.trial import Trial, check_difference, first_right, tolerance_of

EXPERTS_NAME = "specdist_sorted"
KERNEL = "a kernel of all experts"
MAX_SORTED = 4096  # pairs of a token and its expert: each is compared with all

# The quantised tensors that make each joined parameter, with their places in it.
Places = Mapping[str, Sequence[tuple[str, Piece]]]

logger = logging.getLogger(__name__)


# The product of sorted tokens [S, K], of which each expert's end at one of the numbers [E]: [S, N], zeros for
# those of no expert here.
Product = Callable[[Tensor, Tensor], Tensor]


def ends_of(ids_S: Tensor, num_experts: int) -> Tensor:
    """int32 [E]: where the tokens of each expert end, which are sorted: ``ids_S`` from 0 to E - 1, or above
    for experts of other ranks."""
    experts_E = torch.arange(num_experts, dtype=ids_S.dtype, device=ids_S.device)
    return torch.searchsorted(ids_S, experts_E, right=True, out_int32=True)


class PackedExperts(nn.Module):
    """Stands in the place of a joined parameter of E matrices [K] → [N], as buffers; on the meta device until
    it is filled.

    Args:
        shape: of this rank's part, as the parameter has it.
        cut: of the whole parameter; None if this rank has all of it.
        is_transposed: the parameter is [E, K, N], and not [E, N, K].
    """

    def __init__(
        self, form: LayerFormat, shape: Sequence[int], cut: Cut | None, *, is_transposed: bool
    ) -> None:
        super().__init__()
        self.form, self.cut = form, cut
        self.dims = (0, 2, 1) if is_transposed else (0, 1, 2)
        self.num_experts, self.out_features, self.in_features = (shape[dim] for dim in self.dims)
        width = self.in_features // 2 if form.is_halved else self.in_features
        scales = (self.num_experts, *form.num_scales(self.out_features, self.in_features))
        meta = torch.device("meta")
        shape = (self.num_experts, self.out_features, width)
        numbers = torch.empty(shape, dtype=DTYPES[form.numbers], device=meta)
        self.register_buffer("numbers", numbers)
        self.register_buffer("scales", torch.empty(scales, dtype=form.scale_dtype, device=meta))
        zeros = torch.empty(scales, dtype=torch.int8, device=meta) if form.has_zeros else None
        self.register_buffer("zeros", zeros)
        self.product: Product = self.dequantized_product

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self.buffers())

    def matrix(self, index: int) -> QuantizedWeight:
        """A view of one expert's matrix."""
        numbers, scales, zeros = self.numbers, self.scales, self.zeros
        assert isinstance(numbers, Tensor) and isinstance(scales, Tensor)
        zeros_AB = zeros[index] if isinstance(zeros, Tensor) else None
        return QuantizedWeight(self.form, self.in_features, numbers[index], scales[index], zeros_AB)

    def held(self, whole: Tensor | QuantizedWeight) -> QuantizedWeight:
        """Rows of one expert, with scales that the ranks' parts do not share."""
        assert isinstance(whole, QuantizedWeight)
        return whole.spread(self.form)

    def dequantized_product(self, x_SK: Tensor, ends_E: Tensor) -> Tensor:
        """What every other product must equal, up to rounding: expert by expert."""
        output_SN, begin = x_SK.new_zeros(len(x_SK), self.out_features), 0
        for index, end in enumerate(ends_E.tolist()):
            if begin < end:
                weight = self.matrix(index).dequantized(x_SK.dtype)
                output_SN[begin:end] = F.linear(x_SK[begin:end], weight)
            begin = end
        return output_SN

    def kernel_product(self, x_SK: Tensor, ends_E: Tensor) -> Tensor:
        """The product with all experts in one launch, without waiting for the device."""
        from specdist.kernels.experts import grouped_packed_product

        form = self.form
        output: Tensor = grouped_packed_product(
            x_SK, ends_E, self.numbers, self.scales, self.zeros, kind=form.numbers, rows=form.rows,
            columns=form.columns, num_outputs=self.out_features,
        )  # fmt: skip
        return output

    def choose_product(self, dtype: torch.dtype, agree: Callable[[bool], bool] = bool) -> Trial[Product]:
        """Take the kernel where a trial on the devices of all ranks, GPUs, finds it right."""
        assert isinstance(self.numbers, Tensor)
        device, generator = self.numbers.device, torch.Generator().manual_seed(self.in_features)
        x_SK = torch.randn(TRIAL_TOKENS, self.in_features, generator=generator).to(device, dtype)
        ids_S = torch.arange(TRIAL_TOKENS, device=device) * self.num_experts // TRIAL_TOKENS
        ends_E = ends_of(ids_S, self.num_experts)

        def check(product: Product) -> None:
            expected, found = self.dequantized_product(x_SK, ends_E), product(x_SK, ends_E)
            difference = float((found - expected).float().norm() / expected.float().norm())
            check_difference("its numbers differ", difference, tolerance_of("quantised product", dtype))

        candidates: dict[str, Callable[[], Product]] = {}
        if device.type == "cuda":
            candidates = {KERNEL: lambda: self.kernel_product}
        trial = first_right(candidates, check, agree)
        self.product = trial.found or self.dequantized_product
        return trial


def plain_sort(hidden_TH: Tensor, ids_TC: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    """Pairs of a token and its expert by expert: rows [S, H]; ends of experts, int32 [E]; each pair's place,
    and the experts, int64 [S] both. Those of other ranks, from E on, are last, as the last one here."""
    ids_S, order_S = ids_TC.reshape(-1).sort(stable=True)
    places_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(ids_S), device=ids_S.device))
    rows_SH = hidden_TH[order_S // ids_TC.shape[1]]
    return rows_SH, ends_of(ids_S, num_experts), places_S, ids_S.clamp(max=num_experts - 1)


def plain_sum(
    rows_SH: Tensor, places_S: Tensor, ids_TC: Tensor, weights_TC: Tensor, biases_EH: Tensor | None,
    num_experts: int | None,
) -> Tensor:  # fmt: skip
    """[T, H]: of every token its pairs' rows, with biases of their experts, by weight. ``num_experts``: of
    this rank, where others have more; products leave out the rows of those."""
    rows_TCH = rows_SH[places_S].view(*ids_TC.shape, -1)
    if biases_EH is not None:
        rows_TCH += biases_EH[ids_TC.clamp(max=len(biases_EH) - 1)]
    weighted_TCH = rows_TCH * weights_TC[..., None]
    if num_experts is not None:
        weighted_TCH = weighted_TCH.masked_fill((ids_TC >= num_experts)[..., None], 0)
    return weighted_TCH.sum(dim=1).to(rows_SH.dtype)


@functools.cache
def sorting_on(device: torch.device, dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[..., Tensor]]:
    """What sorts and sums few pairs on a GPU: kernels, if a trial finds them right."""

    def kernels() -> Any:
        from specdist.kernels.experts import sort_pairs, sum_pairs  # Triton is not everywhere

        return sort_pairs, sum_pairs

    def check(found: Any) -> None:
        rows_TH = torch.arange(1.0, 37.0).sin().view(9, 4).to(device, dtype)
        ids_TC = (torch.arange(18).view(9, 2) * 5 % 8).to(device)
        own, expected = (sort(rows_TH, ids_TC, 7) for sort in (found[0], plain_sort))
        if not all(map(torch.equal, own, expected)):
            raise ValueError("they are in another order")
        numbers = expected[0], expected[2], ids_TC, rows_TH[:, :2], rows_TH[:7], 7
        difference = float((found[1](*numbers) - plain_sum(*numbers)).abs().max())
        check_difference("their sums differ", difference, tolerance_of("formula", dtype))

    trial = first_right({"Triton kernels": kernels}, check)
    trial.report(logger, f"pairs of tokens and experts on {device}", "plain operations, which are slower")
    return trial.found or (plain_sort, plain_sum)


def sorted_experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward for transformers' ``ExpertsInterface``: [T, H], with each token's experts [T, k] and their
    weights. Of plain experts the numbers are those of its grouped products, by fewer kernels."""
    is_few, dtype = hidden_states.is_cuda and top_k_index.numel() <= MAX_SORTED, hidden_states.dtype
    sort, sum_up = sorting_on(hidden_states.device, dtype) if is_few else (plain_sort, plain_sum)
    inputs, ends_E, places_S, own_S = sort(hidden_states, top_k_index, self.num_experts)

    def product(leaf: str, inputs: Tensor) -> Tensor:
        weights = getattr(self, leaf)
        if isinstance(weights, PackedExperts):
            return weights.product(inputs, ends_E)
        output: Tensor = _grouped_linear(inputs, weights, ends_E, is_transposed=self.is_transposed)
        return output

    outputs, biases_EH = product(up_name(self), inputs), None
    if self.has_bias:
        outputs += getattr(self, f"{up_name(self)}_bias")[own_S]
        biases_EH = self.down_proj_bias
    outputs = self._apply_gate(outputs) if self.has_gate else self.act_fn(outputs)
    outputs = product("down_proj", outputs)
    if self.has_post_expert_norm:
        outputs = self.post_expert_norm(outputs if biases_EH is None else outputs + biases_EH[own_S])
        biases_EH = None
    of_rank = self.num_experts if self._is_expert_parallel else None
    return sum_up(outputs, places_S, top_k_index, top_k_weights, biases_EH, of_rank).to(dtype)


ExpertsInterface.register(EXPERTS_NAME, sorted_experts_forward)


def use_sorted_experts(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Let experts in plain numbers run by :func:`sorted_experts_forward`, too, where transformers' grouped
    products would run them."""
    for _, module in experts_of(model):
        sorting_on(device, dtype)
        if module.config._experts_implementation == "grouped_mm":  # type: ignore[union-attr]
            _sort(module)


def _sort(module: Any) -> None:
    module.config = copy.copy(module.config)  # other experts may run otherwise
    module.config._experts_implementation = EXPERTS_NAME


def up_name(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def packed_experts_of(model: nn.Module) -> Iterator[tuple[str, PackedExperts]]:
    """A model's packed experts, by the names of the parameters in whose place they are."""
    for name, module in model.named_modules():
        if isinstance(module, PackedExperts):
            yield name, module


@torch.no_grad()
def fill_quantized(
    target: QuantizedLinear | PackedExperts, piece: Piece, whole: Tensor | QuantizedWeight
) -> None:
    """Fill what this rank has of a matrix, whose place in the whole parameter is ``piece``."""
    whole = target.held(whole)
    for own in piece.on_rank(target.cut):
        found = whole
        for _, (dim, start, length) in own.steps[len(piece.steps) :]:  # narrowed to the rank's own
            found = found.cut(target.dims[-2:].index(dim), start, start + length)
        *expert, row, column = (own.begin[dim] for dim in target.dims)
        matrix = target.weight if isinstance(target, QuantizedLinear) else target.matrix(*expert)
        matrix.place(row, column, found)


def place_experts(
    model: nn.Module, name: str, formats: Mapping[str, LayerFormat], places: Places, dtype: torch.dtype
) -> None:
    """Put packed experts in the place of the parameters that are made of quantised tensors, on the meta
    device, whole or cut, and log what stays packed and what does not.

    Args:
        name: of the checkpoint.
        formats: by quantised tensor.
        dtype: of dequantised weights.
    """
    kept: Counter[str] = Counter()
    dequantized: Counter[str] = Counter()
    for module_name, module in experts_of(model):
        leaves = (up_name(module), "down_proj")
        of_leaves = [places.get(f"{module_name}.{leaf}", ()) for leaf in leaves]
        if not any(of_leaves):
            continue
        try:
            packed = [
                _packed(module, leaf, formats, found) for leaf, found in zip(leaves, of_leaves, strict=True)
            ]
        except ValueError as error:
            dequantized[str(error)] += sum(module.get_parameter(leaf).numel() for leaf in leaves)
            continue
        for leaf, each in zip(leaves, packed, strict=True):
            delattr(module, leaf)  # the parameter
            setattr(module, leaf, each)
            kept[str(each.form)] += each.num_bytes
        _sort(module)
    for form, num_bytes in kept.items():
        logger.info("experts of %s stay as stored (%s): %.2f GiB here", name, form, num_bytes / GIB)
    for reason, count in dequantized.items():
        logger.warning(
            "quantised experts of %s are dequantised (%s): %.2f GiB here", name, reason,
            count * dtype.itemsize / GIB,
        )  # fmt: skip


def _packed(
    module: Any, leaf: str, formats: Mapping[str, LayerFormat], places: Sequence[tuple[str, Piece]]
) -> PackedExperts:
    """The packed experts of one parameter. Raises ValueError for what cannot stay packed."""
    parameter, cut = module.get_parameter(leaf), cut_of(module, leaf)
    forms = {formats.get(source) for source, _ in places}
    form = forms.pop() if len(forms) == 1 else None
    if form is None:
        raise ValueError("not all of a layer are quantised in one way")
    rows, columns = (2, 1) if module.is_transposed else (1, 2)
    for _, piece in places:
        is_turned = sum(step == "transpose" for step, _ in piece.steps) % 2 == 1
        if is_turned != module.is_transposed or any(step == "narrow" for step, _ in piece.steps):
            raise ValueError("their parts lie in an order that is not known here")
    joined = _border(rows, cut, places), _border(columns, cut, places)
    if form.is_halved and joined[1] % 2:
        raise ValueError(f"a rank has {joined[1]} columns, and two share a byte")
    if form.columns is not None and form.columns & (form.columns - 1):
        raise ValueError(f"groups of {form.columns} columns, which is not a power of two")
    return PackedExperts(form.within(*joined), parameter.shape, cut, is_transposed=module.is_transposed)


def _border(dim: int, cut: Cut | None, places: Sequence[tuple[str, Piece]]) -> int:
    """Number along a dimension of the whole parameter between multiples of which all its parts lie."""
    ends = {piece.shape[dim] for _, piece in places}  # which lie side by side
    if cut is not None and cut.dim == dim:
        ends |= {end for own in cut.ranges for end in (own.start, own.stop)}
    return math.gcd(*ends)
