"""A pass of an emulated device is over when its time has gone by, and blocks nobody who does not ask."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from tests.lab.emulation.accounting import SideLog, busy_until, round_times
from tests.lab.emulation.device import EmulatedDevice

PASS_NS = 30_000_000


@pytest.fixture
def device() -> EmulatedDevice:
    return EmulatedDevice()


def test_a_result_is_read_when_all_that_was_queued_before_it_is_done(device: EmulatedDevice) -> None:
    """Two passes, one after the other; what is computed from a result is one, too."""
    begin = time.monotonic_ns()
    device.queue(PASS_NS)
    device.queue(PASS_NS)
    numbers = device.tensor(torch.arange(4))
    doubled = torch.cat([numbers, numbers])[:4].double() * 2
    # Not a bound on this machine's speed: queueing does not wait for a device that is busy until later.
    assert device.free_at_ns >= begin + 2 * PASS_NS
    on_host = doubled.cpu()
    assert time.monotonic_ns() >= device.free_at_ns
    assert type(on_host) is torch.Tensor and on_host.tolist() == [0, 2, 4, 6]


def test_a_copy_that_does_not_block_is_waited_for_by_its_event(device: EmulatedDevice) -> None:
    device.queue(PASS_NS)
    copied = device.tensor(torch.ones(2)).to("cpu", non_blocking=True)
    event = device.new_event()
    event.record()
    device.queue(100 * PASS_NS)
    assert type(copied) is torch.Tensor
    event.synchronize()
    assert event.query() and time.monotonic_ns() < device.free_at_ns


def test_an_idle_device_begins_at_once_and_a_busy_one_when_it_is_free(device: EmulatedDevice) -> None:
    device.queue(PASS_NS)
    device.queue(PASS_NS)
    device.wait()
    device.queue(PASS_NS)
    (first, second, third) = device.passes
    assert second[0] == first[1] and third[0] >= second[1]


def test_a_stand_in_that_takes_longer_than_its_pass_is_counted(device: EmulatedDevice) -> None:
    for duration in (1, 10**12, 1):
        device.queue(duration)
        with device.standing_in():
            sum(range(1000))
    device.queue(0)
    assert device.num_slow == 2


def side(passes: list[tuple[int, int]], spans: list[tuple[int, int]] | None = None) -> SideLog:
    return SideLog(np.array(passes), np.array(spans or []).reshape(-1, 2), 0)


def test_busy_time_counts_overlaps_once() -> None:
    intervals = np.array([(10, 20), (15, 30), (40, 50), (42, 44)])
    moments = np.array([0, 10, 12, 25, 35, 43, 60])
    assert busy_until(intervals, moments).tolist() == [0, 0, 2, 15, 20, 23, 30]


def test_what_synchronous_and_asynchronous_drafting_expose() -> None:
    """Rounds of 100: if synchronous whatever no device covers; if asynchronous the rest of the busier device,
    which in the second round is the draft."""
    edges = np.array([100, 200, 300])
    target = side([(100, 160), (200, 250), (300, 350)])
    drafts_now = side([(170, 190), (260, 280)], [(165, 195), (255, 285)])
    synchronous = round_times(edges, target, drafts_now, is_asynchronous=False)
    assert synchronous.exposed_R.tolist() == [20, 30]
    assert synchronous.exposed_share == 0.25
    drafts_ahead = side([(100, 140), (200, 270)], [(180, 190), (275, 285)])
    ahead = round_times(edges, target, drafts_ahead, is_asynchronous=True)
    assert ahead.exposed_R.tolist() == [40, 30]


def test_a_synchronous_round_of_a_draft_that_may_work_ahead_needs_both_devices() -> None:
    """Where every round is chosen, a draft may work before its reply, too: nobody's host is to blame."""
    edges, spans = np.array([100, 200]), [(170, 190)]
    draft = side([(100, 160), (172, 187)], spans)
    times = round_times(edges, side([(100, 165), (200, 250)]), draft, is_asynchronous=True)
    assert times.exposed_R.tolist() == [100 - 65 - 15]
