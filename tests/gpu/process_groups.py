"""torch.distributed with the backends ``cpu:gloo,cuda:nccl``, on gloo alone.

As in torch a tensor's device picks the backend; barriers, object collectives and new groups go to gloo.
Before anything is sent the members of a group must have said that they want the same
(:mod:`tests.gpu.meetings`). What NCCL refuses is refused: other dtypes, tensors with gaps, another rank's
device, a first call, which connects the ranks, while a graph is captured, a collective that some ranks have
captured and others have not. A capture does not record gloo's collectives, so they are refused there, too.
Each algorithm takes memory of the device at its first use. The end of a world would wait for every graph that
has captured one of its collectives.

What the project does not use raises NotImplementedError, so that nothing passes unchecked.
"""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpu.device import DEVICE, CudaTensor
from tests.gpu.meetings import GLOO, NCCL, Call
from tests.gpu.recording import Recording
from tests.gpu.referee import Line, call_stack

BACKENDS = "cpu:gloo,cuda:nccl"
ROUTED = (
    "broadcast", "all_reduce", "reduce", "gather", "scatter", "all_gather", "all_gather_into_tensor",
    "reduce_scatter_tensor", "send", "recv", "barrier",
)  # fmt: skip
UNUSED = (
    "isend", "irecv", "batch_isend_irecv", "all_to_all", "all_to_all_single", "all_reduce_coalesced",
    "all_gather_coalesced", "reduce_scatter", "monitored_barrier",
)  # fmt: skip
NCCL_DTYPES = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    }
)  # fmt: skip
# Which tensor of a call must be alike on all members; the lists are checked against it.
OWN_TENSOR = {
    "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor",
    "reduce_scatter_tensor": "output",
}
LISTS = {"gather": "gather_list", "scatter": "scatter_list", "all_gather": "tensor_list"}
ROOTS = {"broadcast": "src", "reduce": "dst", "gather": "dst", "scatter": "src", "send": "dst", "recv": "src"}
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter_tensor")
# They have an algorithm of their own; that of sums depends on their length, here by the octave.
TO_PEERS = ("gather", "scatter", "send", "recv")


class _Rank:
    """This process's side: its line to the referee, and which groups NCCL has connected."""

    def __init__(self) -> None:
        self.line = Line(int(os.environ["RANK"]))
        self.connected: set[str] = set()
        # Those that have captured collectives, as long as somebody refers to them.
        self.recordings: weakref.WeakSet[Recording] = weakref.WeakSet()


_rank: _Rank | None = None
_init_process_group, _new_group = dist.init_process_group, dist.new_group
_destroy_process_group = dist.destroy_process_group


def install() -> None:
    """To be called before the process joins a world, and for as long as the process lasts."""
    _set("init_process_group", init_process_group)
    _set("new_group", new_group)
    _set("destroy_process_group", destroy_process_group)
    for name in ROUTED:
        _set(name, _routed(getattr(dist, name)))
    for name in UNUSED:
        setattr(dist, name, _unused(name))  # torch's own functions go on using these


def _set(name: str, function: Callable[..., Any]) -> None:
    # torch's own object collectives look in the second module.
    setattr(dist, name, function)
    setattr(c10d, name, function)


def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> None:
    """As torch's, for the backends of a world of GPUs alone."""
    global _rank
    if backend != BACKENDS:
        raise ValueError(f"backend {backend}: ranks with GPUs join their world with {BACKENDS}")
    _rank = _Rank()
    _init_process_group("gloo", *args, **options)


def new_group(ranks: Any = None, *args: Any, **options: Any) -> Any:
    """As torch's: all ranks of the world must call it, those that will not be members too."""
    members = range(dist.get_world_size()) if ranks is None else ranks
    _meet(dist.group.WORLD, "new_group", GLOO, detail=f"of ranks {sorted(members)}")
    return _new_group(ranks, *args, **options)


def recordings_with_collectives() -> list[Recording]:
    """Of graphs of this process that somebody still refers to."""
    return [] if _rank is None else list(_rank.recordings)


def destroy_process_group(group: Any = None) -> None:
    """As torch's. A communicator's end waits until no graph refers to it (NCCL, ``commDestroySync``)."""
    if num := len(recordings_with_collectives()):
        raise RuntimeError(f"destroy_process_group() waits for {num} graphs that captured collectives")
    _destroy_process_group(group)


def _routed(real: Callable[..., Any]) -> Callable[..., Any]:
    """Run the collective once all members are there, on the backend of its tensors' device."""
    name, signature = real.__name__, inspect.signature(real)

    @functools.wraps(real)
    def collective(*args: Any, **options: Any) -> Any:
        call = signature.bind(*args, **options)
        call.apply_defaults()
        values = call.arguments
        if values.get("async_op"):
            raise NotImplementedError(f"{name} with async_op=True is not faked")
        group = values.get("group") or dist.group.WORLD
        if dist.get_rank(group) < 0:
            return real(*args, **options)  # which warns, and does nothing
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
        backend = _backend_of(name, tensors)
        assert _rank is not None, "init_process_group() comes first"
        if backend == NCCL:
            _check_for_nccl(name, tensors)
        _check_capture(name, backend, group)
        _check_lists(name, values, dist.get_world_size(group))
        meet = functools.partial(
            _meet,
            group,
            name,
            backend,
            tensor=values.get(OWN_TENSOR.get(name, "tensor")),
            peer=_root(name, values, group),
            detail=_detail(name, values),
        )
        host_args, host_options = tree_map(_on_host, (args, options))
        if DEVICE.recording is not None:
            # No rank is met now, but at every replay, with the contents of the tensors at that time.
            recorded = call_stack()
            _rank.recordings.add(DEVICE.recording)
            DEVICE.recording.add(lambda: (meet(recorded=recorded), real(*host_args, **host_options)))
            return None
        meet()
        if backend == NCCL:
            _rank.connected.add(group.group_name)
            _connect(name, group, tensors)
            DEVICE.launch()
        return real(*host_args, **host_options)

    return collective


def _connect(name: str, group: Any, tensors: list[torch.Tensor]) -> None:
    """Take the memory of the algorithm, once."""
    if name in TO_PEERS:
        algorithm = "messages"
    else:
        octave = (tensors[0].nbytes - 1).bit_length()
        algorithm = f"sums of 2^{octave}" if name == "all_reduce" else "rings"
    connection = f"{algorithm} of {group.group_name}"
    if connection not in DEVICE.memory.outside:
        DEVICE.memory.take(connection, DEVICE.memory.connection)


def _unused(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"torch.distributed.{name} is not faked: see tests/gpu/process_groups.py")

    return refuse


def _meet(
    group: Any,
    name: str,
    backend: str,
    *,
    tensor: torch.Tensor | None = None,
    peer: int | None = None,
    detail: str = "",
    recorded: tuple[str, ...] = (),
) -> None:
    """Wait until the members want the same.

    Args:
        peer: the root, or the other end of a message, in the world.
        recorded: where it was captured, if a graph replays it.
    """
    assert _rank is not None, "init_process_group() comes first"
    own = dist.get_rank()
    members: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
    root = peer
    if name in ("send", "recv"):
        assert peer is not None
        members, root = tuple(sorted((own, peer))), own if name == "send" else peer
    _rank.line.wait_for_the_others(
        Call(
            rank=own,
            name=name,
            backend=backend,
            group="the world" if group is dist.group.WORLD else f"group {group.group_name}",
            members=members,
            shapes=() if tensor is None else (tuple(tensor.shape),),
            dtypes=() if tensor is None else (str(tensor.dtype),),
            root=root,
            detail=f"{detail} captured in a graph".lstrip() if recorded else detail,
            stack=(*call_stack(), *(("replays what was captured at", *recorded) if recorded else ())),
        )
    )


def _on_host(value: Any) -> Any:
    return value.host if isinstance(value, CudaTensor) else value


def _backend_of(name: str, tensors: list[torch.Tensor]) -> str:
    """A barrier has no tensor, and goes to gloo."""
    backends = {NCCL if isinstance(tensor, CudaTensor) else GLOO for tensor in tensors} or {GLOO}
    if len(backends) > 1:
        raise RuntimeError(f"{name} of tensors on two devices: {[str(t.device) for t in tensors]}")
    return backends.pop()


def _check_for_nccl(name: str, tensors: list[torch.Tensor]) -> None:
    own = torch.device("cuda", torch.cuda.current_device())
    for tensor in tensors:
        if tensor.dtype not in NCCL_DTYPES:
            raise RuntimeError(f"{name}: NCCL has no data type for {tensor.dtype}")
        if not tensor.is_contiguous():
            raise RuntimeError(f"{name}: NCCL takes contiguous tensors, not strides {tensor.stride()}")
        if tensor.device != own:
            raise RuntimeError(f"{name}: a tensor on {tensor.device} on the rank whose device is {own}")


def _check_capture(name: str, backend: str, group: Any) -> None:
    assert _rank is not None
    if DEVICE.recording is not None and backend == GLOO:
        raise RuntimeError(f"{name} on gloo while a graph is captured: no replay would repeat it")
    if DEVICE.recording is not None and group.group_name not in _rank.connected:
        raise RuntimeError(
            f"{name}: operation not permitted when stream is capturing: NCCL's first call in a group "
            "connects it"
        )


def _check_lists(name: str, values: dict[str, Any], size: int) -> None:
    """The list of the root, or of every member, has for each member a tensor like this rank's own."""
    parts = values.get(LISTS.get(name, ""))
    if parts is None:
        return
    own = values["tensor"]
    kinds = {(part.shape, part.dtype) for part in parts}
    if len(parts) != size or kinds != {(own.shape, own.dtype)}:
        found = sorted(f"{list(shape)} {dtype}" for shape, dtype in kinds)
        raise RuntimeError(
            f"{name}: {len(parts)} tensors like {' and '.join(found)} in the list, for {size} ranks' tensors "
            f"like {list(own.shape)} {own.dtype}"
        )


def _root(name: str, values: dict[str, Any], group: Any) -> int | None:
    """The root's rank in the world; a caller may give its rank in the group instead."""
    if name not in ROOTS:
        return None
    root, place = values.get(ROOTS[name]), values.get(f"group_{ROOTS[name]}")
    if place is not None:
        return int(dist.get_global_rank(group, place))
    if root is None and name == "recv":
        raise NotImplementedError("recv from anybody is not faked: NCCL has no such thing")
    return 0 if root is None else int(root)


def _detail(name: str, values: dict[str, Any]) -> str:
    if name in REDUCTIONS:
        return str(values["op"])
    return f"tag {values['tag']}" if values.get("tag") else ""
