"""The timeline: every nanosecond is counted once, for the phase that ran on the host or the device."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from specdist.engine.times import timeline
from specdist.engine.times.timeline import DeviceClock, HostClock, Kind, Timeline, clock_of


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Set the next readings of the clock."""
    readings: list[int] = []
    monkeypatch.setattr(timeline.time, "perf_counter_ns", lambda: readings.pop(0))
    yield readings
    assert not readings, "the clock was read less often than thought"


def test_a_nested_phase_pauses_the_outer_one(ticks: list[int]) -> None:
    ticks += [100, 110, 130, 160, 200, 250]
    clock = Timeline("host")
    with clock.phase("idle"), clock.phase("transfer"):
        pass
    assert clock.take() == {"host": 10 + 50, "idle": 20 + 40, "transfer": 30}


def test_a_mixed_phase_is_split_and_nothing_is_lost(ticks: list[int]) -> None:
    ticks += [0, 0, 10, 10, 15]
    clock = Timeline("host")
    with clock.mixed_phase({"prefill": 1, "verify": 2}):
        pass
    assert clock.take() == {"prefill": 3, "verify": 7, "host": 0}
    assert clock.take() == {"host": 5}


def test_a_cut_counts_up_to_where_it_was_made_whenever_it_is_read(ticks: list[int]) -> None:
    ticks += [0, 10, 30, 40, 70, 80, 90]
    clock = Timeline("host")
    with clock.phase("verify"):
        pass
    first = clock.cut()
    with clock.phase("idle"):
        # A round's times are read while the next one is at work.
        assert first() == {"host": 10 + 10, "verify": 20}
    assert clock.take() == {"host": 30 + 10, "idle": 10}


def test_what_is_settled_is_told_once_and_the_rest_later(ticks: list[int]) -> None:
    ticks += [0, 10, 30, 70, 95]
    clock = Timeline("host")
    with clock.phase("verify"):
        pass
    assert clock.counted() == {}
    clock.settle()
    with clock.phase("idle"):
        assert clock.counted() == {"host": 10, "verify": 20}
        assert clock.counted() == {}
    clock.settle()
    assert clock.counted() == {"host": 40, "idle": 25}


def test_an_error_ends_its_phase(ticks: list[int]) -> None:
    ticks += [0, 1, 3, 6]
    clock = Timeline("idle")
    with pytest.raises(KeyError), clock.phase("draft"):
        raise KeyError
    assert clock.take() == {"idle": 1 + 3, "draft": 2}


class Device:
    """A device and its host with times set by the test: work is queued at once and done later."""

    def __init__(self) -> None:
        self.host_ns = 0
        self.busy_until_ns = 0

    def host_works(self, ns: int) -> None:
        self.host_ns += ns

    def queue(self, ns: int) -> None:
        self.busy_until_ns = max(self.busy_until_ns, self.host_ns) + ns

    def copy_to_host(self) -> None:
        """The host waits until the device has done everything."""
        self.host_ns = max(self.host_ns, self.busy_until_ns)

    def event(self) -> Event:
        return Event(self)


class Event:
    """Like ``torch.cuda.Event``: complete once the device has done what was queued before it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.reached_ns = -1

    def record(self) -> None:
        self.reached_ns = max(self.device.host_ns, self.device.busy_until_ns)

    def query(self) -> bool:
        assert self.reached_ns >= 0, "not recorded"
        return self.device.host_ns >= self.reached_ns

    def elapsed_time(self, end_event: Event) -> float:
        assert self.query() and end_event.query(), "torch raises an error here"
        # Milliseconds as a float32, as the driver returns them.
        return float(np.float32((end_event.reached_ns - self.reached_ns) / 1e6))


def test_a_phase_on_a_device_lasts_until_its_work_is_done() -> None:
    device = Device()
    clock = Timeline("host", clock=DeviceClock(device.event))
    device.host_works(5_000)
    with clock.phase("draft") as drafting:
        device.host_works(1_000)
        device.queue(70_000)
    # While the device drafts, the host does 10 us of its own, and queues a pass after the draft.
    device.host_works(10_000)
    with clock.mixed_phase({"prefill": 1, "verify": 3}) as verifying:
        device.queue(40_000)
        device.copy_to_host()
    device.host_works(2_000)
    assert clock.take() == {"host": 5_000 + 2_000, "draft": 71_000, "prefill": 10_000, "verify": 30_000}
    assert (drafting.ns, verifying.ns) == (71_000, 40_000)
    assert drafting.is_known and verifying.is_known


def test_unfinished_device_work_is_recorded_later_without_waiting() -> None:
    device = Device()
    clock = Timeline("host", clock=DeviceClock(device.event))
    with clock.phase("verify") as verifying:
        device.queue(90_000)
    device.host_works(1_000)
    assert clock.take() == {"host": 0}
    assert device.host_ns == 1_000, "reading the times has waited for the device"
    assert not verifying.is_known
    with clock.phase("idle"):
        device.copy_to_host()
        device.host_works(4_000)
    assert clock.take() == {"host": 0, "verify": 90_000, "idle": 4_000}
    assert verifying.is_known and verifying.ns == 90_000


@pytest.mark.parametrize("seed", range(20))
def test_the_times_of_a_role_add_up_to_the_devices_time(seed: int) -> None:
    """Whatever is queued, waited for and nested in whatever order: nothing is lost, nothing counted twice."""
    choose = random.Random(seed)
    device = Device()
    clock = Timeline("host", clock=DeviceClock(device.event))
    kinds: list[Kind] = ["prefill", "draft", "verify", "transfer", "idle"]

    def work(depth: int) -> None:
        for _ in range(choose.randrange(4)):
            action = choose.choice([device.queue, device.host_works])
            action(1_000 * choose.randrange(200))
            if choose.random() < 0.3:
                device.copy_to_host()
            if depth < 3 and choose.random() < 0.5:
                with clock.phase(choose.choice(kinds)):
                    work(depth + 1)

    total = 0
    for _ in range(10):
        work(0)
        total += sum(clock.take().values())
        assert total <= device.host_ns
    device.copy_to_host()
    total += sum(clock.take().values())
    # The driver's floats lose less than 10 ns of an interval.
    assert total == pytest.approx(device.host_ns, abs=10 * 200)


def test_a_host_is_timed_by_its_clock_and_a_gpu_by_events() -> None:
    assert isinstance(clock_of(torch.device("cpu")), HostClock)
    assert isinstance(clock_of(torch.device("cuda:0")), DeviceClock)
