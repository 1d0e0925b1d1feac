"""Inputs arrive whole: a host buffer is not touched while its copy is in flight."""

import numpy as np
import torch

from specdist.models.staging import NUM_HOST_BUFFERS, InputStaging


class FakeEvent:
    """In flight from its record until somebody waits."""

    def __init__(self) -> None:
        self.is_in_flight = False

    def record(self) -> None:
        self.is_in_flight = True

    def synchronize(self) -> None:
        self.is_in_flight = False


def test_a_buffer_is_handed_out_again_only_after_its_copy_arrived() -> None:
    events: list[FakeEvent] = []

    def new_event() -> FakeEvent:
        events.append(FakeEvent())
        return events[-1]

    staging = InputStaging(4, torch.device("cpu"), new_event)
    seen = []
    for number in range(2 * NUM_HOST_BUFFERS):
        host = staging.host()
        assert not events[number % NUM_HOST_BUFFERS].is_in_flight
        host[:2] = number
        seen.append(host)
        # Only what was sent arrives.
        assert staging.send(2).tolist() == [number, number, 0, 0]
        assert events[number % NUM_HOST_BUFFERS].is_in_flight
    # While a copy is in flight the next passes fill other memory.
    assert len({array.ctypes.data for array in seen}) == NUM_HOST_BUFFERS
    assert np.shares_memory(seen[0], seen[NUM_HOST_BUFFERS])
