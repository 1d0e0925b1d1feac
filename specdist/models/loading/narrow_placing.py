"""Puts narrow experts into a model, in place of the joined parameters that quantised tensors make.

What cannot stay narrow (a cut through a byte of two numbers, experts that are quantised in several ways, an
order of their parts that is not known here) becomes plain numbers while it is read, and the log says why.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from specdist.models.loading.conversions import Piece
from specdist.models.loading.narrow_experts import EXPERTS_NAME, NarrowExperts, up_name
from specdist.models.quantized.quantized_weights import LayerFormat
from specdist.models.sharding.experts import ExpertsCut, cut_of, experts_of

# By joined parameter: the tensors that are meant, with their places in it.
Places = Mapping[str, Sequence[tuple[str, Piece]]]

logger = logging.getLogger(__name__)


def place_experts(
    model: nn.Module, name: str, formats: Mapping[str, LayerFormat], places: Places, dtype: torch.dtype
) -> None:
    """Narrow experts in place of the parameters that are made of quantised tensors, on the meta device, whole
    or cut; and a line of the log about what stays narrow and what does not.

    Args:
        name: of the checkpoint.
        formats: by tensor that is meant.
        dtype: of plain numbers.
    """
    kept: Counter[str] = Counter()
    plain: Counter[str] = Counter()
    for module_name, module in experts_of(model):
        leaves = (up_name(module), "down_proj")
        of_leaves = [places.get(f"{module_name}.{leaf}", ()) for leaf in leaves]
        if not any(of_leaves):
            continue
        try:
            narrow = [
                _narrow(module, leaf, formats, found) for leaf, found in zip(leaves, of_leaves, strict=True)
            ]
        except ValueError as error:
            plain[str(error)] += sum(module.get_parameter(leaf).numel() for leaf in leaves)
            continue
        for leaf, each in zip(leaves, narrow, strict=True):
            delattr(module, leaf)  # the parameter
            setattr(module, leaf, each)
            kept[str(each.form)] += each.num_bytes
        owner: Any = module
        owner.config = copy.copy(owner.config)  # other experts may have plain numbers
        owner.config._experts_implementation = EXPERTS_NAME
    for form, num_bytes in kept.items():
        logger.info("experts of %s stay as stored (%s): %.2f GiB here", name, form, num_bytes / 2**30)
    for reason, count in plain.items():
        logger.warning(
            "quantised experts of %s become plain numbers (%s): %.2f GiB here",
            name,
            reason,
            count * dtype.itemsize / 2**30,
        )


def _narrow(
    module: Any, leaf: str, formats: Mapping[str, LayerFormat], places: Sequence[tuple[str, Piece]]
) -> NarrowExperts:
    """Raises ValueError for what cannot stay narrow."""
    parameter, cut = module.get_parameter(leaf), cut_of(module, leaf)
    forms = {formats.get(meant) for meant, _ in places}
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
    return NarrowExperts(form.within(*joined), parameter.shape, cut, is_transposed=module.is_transposed)


def _border(dim: int, cut: ExpertsCut | None, places: Sequence[tuple[str, Piece]]) -> int:
    """Number along a dimension of the whole parameter between multiples of which all its parts lie."""
    ends = {piece.shape[dim] for _, piece in places}  # which lie side by side
    if cut is not None and cut.dim == dim:
        ends |= {end for own in cut.ranges for end in (own.start, own.stop)}
    return math.gcd(*ends)
