"""Inputs arrive whole: a host buffer is not touched while its copy is in flight. Nor does the host wait."""

import numpy as np
import torch

from specdist.models.passes.graphs import MAX_HOST_BUFFERS, NUM_HOST_BUFFERS, InputStaging


class FakeEvent:
    """In flight from its record until it is said to have arrived, or somebody waits."""

    def __init__(self) -> None:
        self.is_in_flight = False
        self.num_waits = 0

    def record(self) -> None:
        self.is_in_flight = True

    def query(self) -> bool:
        return not self.is_in_flight

    def synchronize(self) -> None:
        self.is_in_flight = False
        self.num_waits += 1


def staging_with(events: list[FakeEvent]) -> InputStaging:
    def new_event() -> FakeEvent:
        events.append(FakeEvent())
        return events[-1]

    return InputStaging(4, torch.device("cpu"), new_event)


def send(staging: InputStaging, number: int) -> np.ndarray:
    host = staging.host()
    host[:2] = number
    # Only what was sent arrives.
    assert staging.send(2).tolist() == [number, number, 0, 0]
    return host


def test_a_buffer_whose_copy_has_arrived_is_used_again() -> None:
    events: list[FakeEvent] = []
    staging = staging_with(events)
    seen = []
    for number in range(2 * NUM_HOST_BUFFERS):
        seen.append(send(staging, number))
        assert events[number % NUM_HOST_BUFFERS].is_in_flight
        if number:
            events[(number - 1) % NUM_HOST_BUFFERS].is_in_flight = False
    # While a copy is in flight the next passes fill other memory.
    assert len({array.ctypes.data for array in seen}) == len(events) == NUM_HOST_BUFFERS
    assert np.shares_memory(seen[0], seen[NUM_HOST_BUFFERS])


def test_while_all_copies_are_in_flight_the_host_fills_new_buffers_up_to_a_bound() -> None:
    events: list[FakeEvent] = []
    staging = staging_with(events)
    seen = {send(staging, number).ctypes.data for number in range(MAX_HOST_BUFFERS)}
    assert len(seen) == len(events) == MAX_HOST_BUFFERS
    assert not any(event.num_waits for event in events)
    # The oldest copy is waited for, and no other.
    assert send(staging, 0).ctypes.data in seen
    assert [event.num_waits for event in events] == [1] + [0] * (MAX_HOST_BUFFERS - 1)
