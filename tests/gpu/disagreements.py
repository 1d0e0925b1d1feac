"""Two ranks on fake GPUs whose collectives do not match: every rank runs :func:`rank` with one fault."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.gpu import process_groups
from tests.gpu.device import install, prepare

GPU = torch.device("cuda", 0)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype).to(GPU)


def in_another_order(own: int) -> None:
    tensor = ones(4)
    if own == 0:
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
    else:
        dist.broadcast(tensor, 0)
        dist.all_reduce(tensor)


def on_another_backend(own: int) -> None:
    dist.broadcast(ones(4) if own == 0 else torch.ones(4), 0)


def another_shape(own: int) -> None:
    dist.all_reduce(ones(4) if own == 0 else ones(2, 2))


def another_dtype(own: int) -> None:
    dist.all_reduce(ones(4) if own == 0 else ones(4, dtype=torch.bfloat16))


def another_root(own: int) -> None:
    dist.broadcast(ones(4), own)


def another_reduction(own: int) -> None:
    dist.all_reduce(ones(4), dist.ReduceOp.SUM if own == 0 else dist.ReduceOp.MAX)


def in_another_group(own: int) -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    dist.all_reduce(ones(4), group=first if own == 0 else second)


def a_message_of_another_shape(own: int) -> None:
    if own == 0:
        dist.send(torch.ones(4), 1)
    else:
        dist.recv(torch.ones(5), 0)


def messages_to_one_another(own: int) -> None:
    dist.send(ones(4), 1 - own)


def a_message_and_a_barrier(own: int) -> None:
    if own == 0:
        dist.send(torch.ones(4), 1)
    else:
        dist.barrier()


def an_object_and_a_barrier(own: int) -> None:
    """An object collective is two broadcasts on gloo."""
    if own == 0:
        dist.broadcast_object_list(["text"], 0)
    else:
        dist.barrier()


def one_stays_away(own: int) -> None:
    if own == 0:
        dist.all_reduce(ones(4))
    else:
        time.sleep(60)  # its line is in the message


def one_ends_before_gloo(own: int) -> None:
    if own == 0:
        dist.barrier()


def one_ends_before_nccl(own: int) -> None:
    if own == 0:
        dist.all_reduce(ones(4))


def what_one_rank_is_refused(own: int) -> None:
    """Calls that are wrong on their own; prints each refusal on a line."""
    asynchronous = {"async_op": True}
    refuse(lambda: dist.all_reduce(ones(4, 4)[:, ::2]))
    refuse(lambda: dist.all_reduce(ones(4, dtype=torch.int16)))
    refuse(lambda: dist.all_gather([torch.ones(4), torch.ones(4)], ones(4)))
    refuse(lambda: dist.all_gather([ones(4), ones(5)], ones(4)))
    refuse(lambda: dist.all_reduce(ones(4), **asynchronous))
    refuse(lambda: dist.all_to_all_single(ones(4), ones(4)))
    refuse(lambda: capture(dist.barrier))
    tensor = ones(4)
    refuse(lambda: capture(lambda: dist.all_reduce(tensor)))
    torch.cuda.set_device(own + 1)
    refuse(lambda: dist.all_reduce(tensor))


def capture(function: Callable[[], object]) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
        function()


def one_replays_what_the_other_does_not(own: int) -> None:
    tensor = ones(4)
    dist.all_reduce(tensor)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        dist.all_reduce(tensor)
    assert tensor.tolist() == [2, 2, 2, 2], "a capture runs nothing"
    tensor.copy_(ones(4))
    graph.replay()
    assert tensor.tolist() == [2, 2, 2, 2]
    if own == 0:
        graph.replay()
    else:
        dist.barrier()


def refuse(function: Callable[[], object]) -> None:
    try:
        function()
    except (RuntimeError, NotImplementedError) as error:
        sys.stdout.write(f"{error}\n")
    else:
        raise AssertionError("nothing was refused")


def all_is_well(own: int) -> None:
    """The collectives that the project uses, with the results that torch gives."""
    group = dist.new_group([0, 1])
    for device in (GPU, torch.device("cpu")):
        own_2 = torch.full((2,), float(own + 1)).to(device)
        total_2 = own_2.clone()
        dist.all_reduce(total_2, group=group)
        assert total_2.tolist() == [3, 3]
        everyone = own_2.new_empty(2, 2)
        dist.all_gather(list(everyone), own_2)
        assert everyone.tolist() == [[1, 1], [2, 2]]
        gathered = own_2.new_empty(2, 2)
        dist.gather(own_2, list(gathered) if own == 0 else None, 0, group=group)
        assert own or gathered.tolist() == [[1, 1], [2, 2]]
        told_2 = own_2.clone()
        dist.broadcast(told_2, 1)
        assert told_2.tolist() == [2, 2]
        if own == 0:
            dist.send(own_2, 1)
        else:
            dist.recv(told_2, 0)
            assert told_2.tolist() == [1, 1]
        assert told_2.device == device
    box = ["a text" if own == 0 else None]
    dist.broadcast_object_list(box, 0)
    assert box == ["a text"]
    boxes = [None, None]
    dist.all_gather_object(boxes, own)
    assert boxes == [0, 1]
    alone = dist.new_group([1])
    if own == 1:
        dist.barrier(group=alone)
    dist.barrier()


def rank(name: str, rendezvous: str) -> int:
    """One rank of the world; its exit code."""
    prepare()
    process_groups.install()
    own = int(os.environ["RANK"])
    dist.init_process_group(
        process_groups.BACKENDS,
        init_method=f"file://{rendezvous}",
        rank=own,
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    install()
    globals()[name](own)
    return 0
