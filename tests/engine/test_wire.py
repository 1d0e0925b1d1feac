"""Messages of every size survive the wire, and requests and replies arrive unchanged."""

import dataclasses
import socket
import threading
from collections import deque

import numpy as np
import pytest
import torch
from torch import Tensor

from specdist.engine.messages import links
from specdist.engine.messages.packing import pack, unpack
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.messages.wire import FRAME_WORDS, Wire
from specdist.engine.target.opened import OpenedSequences
from specdist.engine.times.reports import AheadReport, RoleTimes, TracedDrafts
from specdist.models.cache.pages import PageUpdates
from specdist.models.passes.flat import FlatBatch


class Line:
    """Both ends of a wire in one process; a receiver must expect exactly the sizes that were sent."""

    def __init__(self) -> None:
        self._sent: deque[Tensor] = deque()
        self.near = Wire(lambda tensor: self._sent.append(tensor.clone()))
        self.far = Wire(lambda tensor: tensor.copy_(self._sent.popleft()))

    @property
    def num_waiting(self) -> int:
        return len(self._sent)


def test_messages_of_sizes_around_the_frame_arrive() -> None:
    line = Line()
    for size in (0, 1, FRAME_WORDS - 4, FRAME_WORDS - 3, FRAME_WORDS - 2, 3 * FRAME_WORDS):
        arrays = [np.arange(size), np.zeros(0, np.int64)]
        line.near.send(arrays)
        assert line.num_waiting == (1 if size <= FRAME_WORDS - 3 else 2)
        received = line.far.receive()
        assert line.num_waiting == 0
        assert [array.tolist() for array in received] == [array.tolist() for array in arrays]


def test_an_empty_message_ends_the_loop() -> None:
    line = Line()
    line.near.send([])
    assert line.far.receive() == []


def test_a_rank_with_a_device_stays_awake_until_a_message_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for ever: one that is not asked for long sleeps. Where ranks share their cores, at once."""
    assert links.wait_of(torch.device("cpu")) is None
    assert links.wait_of(torch.device("cuda", 0)) is links.busy_wait
    near, far = socket.socketpair()
    with near, far:
        monkeypatch.setattr(links, "ASKING_S", 0)
        links.busy_wait(far)
        monkeypatch.setattr(links, "ASKING_S", 60)
        # The other thread can run only if this one lets it.
        sender = threading.Timer(0.05, near.sendall, [b"1234"])
        sender.start()
        links.busy_wait(far)
        assert far.recv(4, socket.MSG_DONTWAIT) == b"1234"
        sender.join()


def assert_same(first: object, second: object) -> None:
    for field in dataclasses.fields(first):  # type: ignore[arg-type]
        mine, theirs = getattr(first, field.name), getattr(second, field.name)
        if dataclasses.is_dataclass(mine):
            assert_same(mine, theirs)
        else:
            assert np.array_equal(mine, theirs), field.name


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_requests_and_replies_arrive_unchanged() -> None:
    line = Line()
    request = ProposalRequest(
        page_updates=PageUpdates.from_entries([(3, 1, 70_000), (0, 2, 5)]),
        slots_R=ints(3, 0),
        num_accepted_R=ints(2, 0),
        next_token_ids_R=ints(-1, 151_000),
        draft_now_R=ints(5, 0),
        num_redraft_R=ints(0, 2),
        next_distributions_W=None,
        suspended_slots=ints(1, 2),
        opened=OpenedSequences(
            slots=ints(1),
            stream_keys=ints(-(2**63) + 5),
            num_misses=ints(9),
            context_lengths=ints(-1),
            max_lengths=ints(40),
        ),
        context=FlatBatch(ints(8, 9), ints(1, 1), ints(0, 1)),
    )
    line.near.send(pack(request))
    received = unpack(ProposalRequest, line.far.receive())
    assert_same(request, received)
    received.meanwhile()
    probabilities = torch.rand(3, generator=torch.Generator().manual_seed(0)).double().numpy()
    reply = ProposalReply(
        next_token_ids_R=ints(4, 151_000),
        num_drafted_R=ints(3, 0),
        candidate_ids_C=ints(7, 8, 9),
        draft_probabilities_C=probabilities,
        ahead=AheadReport(
            num_tokens_R=ints(4, 0),
            num_branches_R=ints(3, 0),
            num_branch_tokens_R=ints(9, 0),
            branch_ranks_R=ints(2, 0),
            is_hit_R=np.array([True, False]),
        ),
        draft_pass_sizes_P=ints(4, 2, 1),
        times=RoleTimes(prefill=2**40, draft=1, transfer=2, idle=3, peak_memory_bytes=2**36),
    )
    traced = TracedDrafts(
        features_4C=np.float32(np.arange(12) / 7).astype(float).reshape(4, 3),
        is_verified_R=np.array([True, True]),
        is_hit_R=np.array([True, False]),
        token_ids_R=ints(4, 70_000),
        features_4R=np.float32(np.arange(8) / 11).astype(float).reshape(4, 2),
        acceptance_R=np.array([1.0, 0.25]),
    )
    for each in (reply, dataclasses.replace(reply, traced=traced)):
        line.near.send(pack(each))
        assert_same(each, unpack(ProposalReply, line.far.receive()))
