"""The checks of test_rules.py; each runs in a process with a fake device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gpu.device import DEVICE, Counts, CudaTensor

GPU = torch.device("cuda", 0)
TWO_DEVICES = "Expected all tensors to be on the same device"


def refusal_of(function: Callable[[], Any]) -> str:
    """The message of the error that a call raises."""
    try:
        function()
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    raise AssertionError("nothing was refused")


def counts_of(function: Callable[[], Any]) -> Counts:
    DEVICE.reset()
    function()
    return DEVICE.counts()


def check_tensors() -> None:
    """They report what CUDA tensors do, views share memory, and values can only be read by a copy."""
    x = torch.arange(6.0, device="cuda")
    made = [
        x,
        torch.tensor([1.0], device=GPU),
        torch.zeros(2).cuda(),
        torch.ones(3).to("cuda"),
        x[1:],
        x.bfloat16(),
    ]
    assert all(isinstance(tensor, CudaTensor) and tensor.device == GPU and tensor.is_cuda for tensor in made)
    x.view(2, 3)[1] = 9.0
    assert x.tolist() == [0, 1, 2, 9, 9, 9] and x.cpu().tolist() == x.tolist()
    assert "Use Tensor.cpu()" in refusal_of(x.numpy)
    model = torch.nn.Linear(3, 2).to(GPU)
    assert isinstance(model.weight, torch.nn.Parameter) and model(x.view(2, 3)).shape == (2, 2)
    model.weight.data = torch.zeros(2, 3, device=GPU)
    assert not torch.count_nonzero(model(x.view(2, 3)).sub(model.bias).cpu())
    torch.cuda.set_device(1)
    other = torch.zeros(6, device="cuda")
    assert other.device == torch.device("cuda", 1) and torch.cuda.current_device() == 1
    assert "cuda:1 and cuda:0" in refusal_of(lambda: x + other)
    with torch.cuda.device(0):
        assert torch.zeros(1, device="cuda").device == GPU
    torch.cuda.set_device(0)
    with torch.inference_mode():
        assert (x + 1).tolist()[0] == 1


def check_current_device() -> None:
    """Triton's kernels go to the current device, whatever that of their tensors."""
    pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")
    from specdist.kernels.sampling import draw

    other = torch.ones(2, 4, device=torch.device("cuda", 1))
    uniforms = torch.zeros(2, device=other.device)
    assert "cuda:1, while cuda:0 is current" in refusal_of(lambda: draw(other, uniforms, not_finite=-1))
    torch.cuda.set_device(1)
    assert draw(other, uniforms, not_finite=-1).tolist() == [0, 0]


def check_devices() -> None:
    """Elementwise operators take one number of the host; all others take tensors of one device."""
    x, host = torch.arange(6.0, device=GPU), torch.arange(6.0)
    index, host_index = torch.tensor([1, 0], device=GPU), torch.tensor([1, 0])
    one, square = torch.tensor(1.0), torch.eye(2, device=GPU)
    assert (x + one).tolist() == [1, 2, 3, 4, 5, 6]
    assert torch.where(x > 2, x, one).tolist() == [1, 1, 1, 3, 4, 5]
    assert x.clone().masked_fill_(x > 2, one).tolist() == [0, 1, 2, 1, 1, 1]
    assert x.clone().fill_(one).tolist() == [1.0] * 6
    assert x.clone().index_put_((index,), one).tolist() == [1, 1, 2, 3, 4, 5]
    assert x[host_index].tolist() == [1, 0] and x.clone().copy_(host).tolist() == host.tolist()
    mixed: list[Callable[[], Any]] = [
        lambda: x + host,
        lambda: host.add_(x),
        lambda: torch.where(x > 2, x, host),
        lambda: x.masked_fill(host > 2, 0.0),
        lambda: torch.cat([x, one[None]]),
        lambda: torch.addmm(one, square, square),
        lambda: x.index_select(0, host_index),
        lambda: host[index],
        lambda: x.clone().index_put_((index,), host[:2]),
        lambda: torch.topk(x, 2, out=(host[:2], index)),
    ]
    for number, function in enumerate(mixed):
        assert TWO_DEVICES in refusal_of(function), number


def check_counts() -> None:
    """Kernels, copies and waits."""
    x, host = torch.arange(6.0, device=GPU), torch.arange(6)
    pinned = torch.zeros(6, pin_memory=True)
    assert pinned.is_pinned() and host.pin_memory().is_pinned() and not host.is_pinned() and not x.is_pinned()

    quiet = counts_of(lambda: (x + 1).view(2, 3)[:, 1:].t().mul_(2))
    assert (quiet.num_kernels, quiet.num_synchronisations, quiet.copies.total()) == (2, 0, 0)
    for function, kind in (
        (lambda: host.to(GPU), "H2D, pageable, blocking"),
        (lambda: host.to(GPU, non_blocking=True), "H2D, pageable, asynchronous"),
        (lambda: x.clone().copy_(pinned, non_blocking=True), "H2D, pinned, asynchronous"),
        (x.cpu, "D2H, pageable, blocking"),
        (lambda: host.copy_(x, non_blocking=True), "D2H, pageable, blocking"),
        (lambda: pinned.copy_(x, non_blocking=True), "D2H, pinned, asynchronous"),
    ):
        counts = counts_of(function)
        assert [key for key, _ in counts.copies.elements()] == [kind]
        assert counts.num_synchronisations == counts.num_copies("blocking") == ("blocking" in kind)
        assert counts.num_copies(kind[:3], "asynchronous") == ("asynchronous" in kind)
    for function, reason in (
        (lambda: float(x[0]), "_local_scalar_dense"),
        (x.tolist, "D2H of tolist()"),
        (lambda: x[host], "H2D of an index on the host"),
        (lambda: x[x > 2], "nonzero of a boolean index"),
        (lambda: torch.equal(x, x), "equal"),
        (lambda: x.repeat_interleave(x.long()), "repeat_interleave without output_size"),
        (lambda: torch.where(x > 2, x, torch.tensor(1.0)), "H2D of a number"),
        (lambda: x.clone().__setitem__(0, 1.0), "H2D, pageable, blocking"),
        (torch.cuda.synchronize, "torch.cuda.synchronize"),
        (torch.cuda.current_stream().synchronize, "torch.cuda.Stream.synchronize"),
        (lambda: recorded_event().synchronize(), "torch.cuda.Event.synchronize"),
    ):
        assert [why for why, _ in counts_of(function).synchronisations.elements()] == [reason]
    for function in (
        lambda: x.clone().masked_fill_(x > 2, 0.0),
        lambda: x.clone().__setitem__(x > 2, 0.0),
        lambda: x.clone().__setitem__(slice(1, None), 1.0),
        lambda: torch.where(x > 2, x, 0.0),
        lambda: x.repeat_interleave(x.long(), output_size=15),
        lambda: recorded_event().query(),
    ):
        assert counts_of(function).num_synchronisations == 0


def recorded_event(**options: Any) -> torch.cuda.Event:
    event = torch.cuda.Event(**options)
    event.record()
    return event
