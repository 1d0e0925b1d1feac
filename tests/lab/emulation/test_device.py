"""A pass of an emulated device is over when its time has gone by, and blocks nobody who does not ask."""

from __future__ import annotations

import torch

from tests.lab.emulation.device import EmulatedDevice


def test_a_result_is_read_when_all_that_was_queued_before_it_is_done() -> None:
    """Two passes, one after the other; what is computed from a result is one, too."""
    device = EmulatedDevice(now_ns=10)
    device.queue(50)
    device.queue(70)
    numbers = device.tensor(torch.arange(4))
    doubled = torch.cat([numbers, numbers])[:4].double() * 2
    assert (device.now_ns, device.num_waits, device.passes) == (10, 0, [(10, 60), (60, 130)])
    on_host = doubled.cpu()
    assert type(on_host) is torch.Tensor and on_host.tolist() == [0, 2, 4, 6]
    assert (device.now_ns, device.num_waits) == (130, 1)
    device.now_ns = 200
    device.queue(30)
    assert device.passes[2] == (200, 230)


def test_a_copy_that_does_not_block_is_waited_for_by_its_event() -> None:
    device = EmulatedDevice()
    device.queue(50)
    copied = device.tensor(torch.ones(2)).to("cpu", non_blocking=True)
    event = device.new_event()
    event.record()
    device.queue(1000)
    assert not device.num_waits and not event.query() and type(copied) is torch.Tensor
    event.synchronize()
    assert event.query() and device.now_ns == 50
