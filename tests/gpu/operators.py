"""What eager CUDA does for each of torch's operators: which devices it accepts, whether the host waits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Not tagged as views, yet their result is the memory of their argument.
ALIASES = frozenset(["detach", "alias", "lift_fresh", "_reshape_alias", "_unsafe_view"])
# They launch no kernel: uninitialised memory, and queries.
WITHOUT_KERNEL = ALIASES | frozenset(
    [
        "empty",
        "new_empty",
        "empty_like",
        "empty_strided",
        "new_empty_strided",
        "is_pinned",
        "record_stream",
        "_fused_sdp_choice",
    ]
)
# Their result, or its shape, is needed on the host before it goes on.
WAITING = frozenset(
    [
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "equal",
        "is_nonzero",
        "item",
        "bincount",
    ]
)
INDEXING = frozenset(
    ["index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"]
)
# Elementwise operators that torch does not tag as such.
ELEMENTWISE = frozenset(["floor_divide", "floor_divide_", "rsub"])
# Others that take a tensor of the host without dimensions as a number.
TAKING_NUMBERS = INDEXING | {"fill", "fill_", "masked_fill", "masked_fill_", "index_fill", "index_fill_"}
COPYING = frozenset(["copy_", "_to_copy"])


@dataclass(frozen=True)
class Operator:
    """What is known of an operator from its schema.

    Attributes:
        name: without its overload, such as ``index_put_``.
        has_kernel: it does work on a device.
        takes_memory: its result is not memory that was there before.
        is_elementwise: it takes a tensor of the host without dimensions beside those of a device.
        returned: for each result the argument that it is, by position and name; None for a new tensor.
        written: position and name of every argument that is written to.
    """

    name: str
    has_kernel: bool
    takes_memory: bool
    is_elementwise: bool
    returned: tuple[tuple[int, str] | None, ...]
    written: tuple[tuple[int, str], ...]

    def new_results(self, result: Any) -> tuple[Tensor, ...]:
        """The tensors of a result that are not arguments."""
        if len(self.returned) == 1:
            results = (result,) if self.returned[0] is None else ()
        else:
            results = tuple(one for one, at in zip(result, self.returned, strict=True) if at is None)
        listed = [one if isinstance(one, (list, tuple)) else [one] for one in results]
        return tuple(tensor for one in listed for tensor in one if isinstance(tensor, Tensor))


@functools.cache
def operator_of(function: torch._ops.OpOverload) -> Operator:
    name = function.overloadpacket.__name__
    schema = function._schema
    written = [
        (position, argument.name, argument.alias_info.before_set)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    returned = [
        next(
            (
                (position, argument)
                for position, argument, aliases in written
                if result.alias_info is not None and result.alias_info.before_set == aliases
            ),
            None,
        )
        for result in schema.returns
    ]
    return Operator(
        name=name,
        has_kernel=not function.is_view and name not in WITHOUT_KERNEL | WAITING,
        takes_memory=None in returned and not function.is_view and name not in ALIASES | WAITING,
        is_elementwise=torch.Tag.pointwise in function.tags or name in ELEMENTWISE,
        returned=tuple(returned),
        written=tuple((position, argument) for position, argument, _ in written),
    )


def argument(at: tuple[int, str], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The argument at a position, however it was passed."""
    position, name = at
    return args[position] if position < len(args) else kwargs.get(name)


def why_devices_differ(operator: Operator, args: Sequence[Any], tensors: Sequence[Tensor]) -> str | None:
    """The error of eager CUDA for tensors of several devices in one operator; None if it accepts them: a
    number of the host beside tensors of a device, or an index on the host."""
    if operator.name in COPYING:
        return None
    if operator.name in INDEXING and args[0].is_cuda:
        tensors = [tensor for tensor in (args[0], *args[2:3]) if isinstance(tensor, Tensor)]
    takes_number = operator.is_elementwise or operator.name in TAKING_NUMBERS
    devices = {
        tensor.device
        for tensor in tensors
        if not (takes_number and tensor.device.type == "cpu" and tensor.dim() == 0)
    }
    if len(devices) < 2:
        return None
    names = " and ".join(sorted(map(str, devices), reverse=True)[:2])
    return f"Expected all tensors to be on the same device, but found at least two devices, {names}!"


def waits(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """Why the host waits for a device inside of an operator on tensors of that device."""
    if operator.name in WAITING:
        return [operator.name]
    if operator.name == "repeat_interleave" and kwargs.get("output_size") is None:
        return ["repeat_interleave without output_size"]
    if operator.name == "fill_" and not args[0].is_cuda:
        return ["D2H of a number"]
    if operator.name == "where":
        return ["H2D of a number" for tensor in args if isinstance(tensor, Tensor) and not tensor.is_cuda]
    if operator.name not in INDEXING:
        return []
    indices = [index for index in args[1] if index is not None]
    reasons = ["H2D of an index on the host" for index in indices if not index.is_cuda and args[0].is_cuda]
    masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
    is_fill = (
        len(args) > 2 and not args[2].is_cuda and args[2].numel() == 1 and len(indices) == len(masks) == 1
    )
    return reasons if is_fill else reasons + ["nonzero of a boolean index" for _ in masks]
