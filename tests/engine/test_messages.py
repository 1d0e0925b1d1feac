"""Messages of every size survive the link, and requests, replies and passes arrive unchanged."""

import dataclasses
import socket
import threading
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdist.engine.messages import codec, link
from specdist.engine.messages.interfaces import PromptTokens, VerifyInput
from specdist.engine.messages.link import CPU, FRAME_WORDS, Link
from specdist.engine.messages.opened import NOTHING_OPENED, OpenedSequences
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.messages.target_states import TargetStates
from specdist.engine.times.reports import AheadReport, DraftSteps, RoleTimes
from specdist.models.batch.flat import FlatBatch
from specdist.models.cache.pages import PageUpdates
from specdist.sampling.distributions import Dense


class Line:
    """Both ends of a link in one process; a receiver must expect exactly the sizes that were sent."""

    def __init__(self) -> None:
        self._sent: deque[Tensor] = deque()
        self.near = Link(lambda tensor: self._sent.append(tensor.clone()))
        self.far = Link(lambda tensor: tensor.copy_(self._sent.popleft()))

    @property
    def num_waiting(self) -> int:
        return len(self._sent)

    def over(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        self.near.send(arrays)
        return self.far.receive()


def test_messages_of_sizes_around_the_frame_arrive() -> None:
    line = Line()
    for size in (0, 1, FRAME_WORDS - 4, FRAME_WORDS - 3, FRAME_WORDS - 2, 3 * FRAME_WORDS):
        arrays = [np.arange(size), np.zeros(0, np.int64)]
        line.near.send(arrays)
        assert line.num_waiting == (1 if size <= FRAME_WORDS - 3 else 2)
        received = line.far.receive()
        assert line.num_waiting == 0
        assert [array.tolist() for array in received] == [array.tolist() for array in arrays]
    assert line.over([]) == []


def test_a_rank_with_a_device_stays_awake_until_a_message_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for ever: one that is not asked for long sleeps. Where ranks share their cores, at once."""
    assert link.wait_of(CPU) is None
    assert link.wait_of(torch.device("cuda", 0)) is link.busy_wait
    near, far = socket.socketpair()
    with near, far:
        monkeypatch.setattr(link, "ASKING_S", 0)
        link.busy_wait(far)
        monkeypatch.setattr(link, "ASKING_S", 60)
        # The other thread can run only if this one lets it.
        sender = threading.Timer(0.05, near.sendall, [b"1234"])
        sender.start()
        link.busy_wait(far)
        assert far.recv(4, socket.MSG_DONTWAIT) == b"1234"
        sender.join()


def assert_same(first: Any, second: Any, *not_sent: str) -> None:
    """Field by field, with the types of arrays; int32 arrives as int64."""
    assert type(first) is type(second)
    for name, mine in vars(first).items():
        theirs = getattr(second, name)
        if dataclasses.is_dataclass(mine):
            assert_same(mine, theirs)
        elif isinstance(mine, np.ndarray):
            assert np.array_equal(mine, theirs) and mine.dtype.kind == theirs.dtype.kind, name
        elif isinstance(mine, Tensor):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), name
        else:
            assert name in not_sent or mine == theirs, name


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


UPDATES = PageUpdates.from_entries([(3, 1, 70_000), (0, 2, 5)])
OPENED = OpenedSequences(
    slots=ints(1, 4),
    stream_keys=ints(-(2**63) + 5, 2**63 - 1),
    num_misses=ints(9, 0),
    context_lengths=ints(-1, 2),
    max_lengths=ints(40, 50),
    num_prompt_tokens=ints(12, 3),
    prefixes=[[7, 151_000], []],
    options_MF=np.array([[0.25, 0.1], [1.0, np.inf]]),
    constraints=["(a|é)*", ""],
)
REQUEST = ProposalRequest(
    page_updates=UPDATES,
    slots_R=ints(3, 0),
    num_accepted_R=ints(2, 0),
    next_token_ids_R=ints(-1, 151_000),
    draft_now_R=ints(5, 0),
    num_redraft_R=ints(0, 2),
    suspended_slots=ints(1, 2),
    opened=NOTHING_OPENED,
    context=FlatBatch(ints(8, 9), ints(1, 1), ints(0, 1)),
)
STATES = TargetStates(ints(3, 0), ints(11, 12), ints(1, 2), torch.rand(3, 5).to(torch.bfloat16))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"opened": OPENED, "num_prefill_tokens": 3, "missed": FlatBatch(ints(5), ints(3), ints(20))},
        {"states": STATES},
        # Not contiguous.
        {"states": STATES, "next_distributions_W": Dense(torch.rand(6, 2).T)},
    ],
    ids=["few", "opened", "states", "all"],
)
def test_requests_arrive_unchanged(changes: dict[str, Any]) -> None:
    request, line = dataclasses.replace(REQUEST, **changes), Line()
    received = codec.unpacked_request(line.over(codec.packed_request(request)), CPU)
    for sent, empty in zip(codec.tensors(request), codec.tensors(received), strict=True):
        line.near.transfer(sent)
        line.far.transfer(empty)
    assert_same(request, received, "sequences", "meanwhile")
    received.meanwhile()


def test_replies_arrive_unchanged() -> None:
    reply = ProposalReply(
        next_token_ids_R=ints(4, 151_000),
        num_drafted_R=ints(3, 0),
        candidate_ids_C=ints(7, 8, 9),
        draft_probabilities_C=np.array([0.1, 1 / 3, 1.0]),
        ahead=AheadReport(
            ints(4, 0), np.array([True, False]), ints(3, 0), ints(9, 0), np.array([True, False])
        ),
        draft_pass_sizes_P=ints(4, 2, 1),
        times=RoleTimes(prefill=2**40, draft=1, transfer=2, idle=3, peak_memory_bytes=2**36),
    )
    features_3C = np.float32(np.arange(9) / 7).astype(float).reshape(3, 3)
    more = dataclasses.replace(
        reply, features_3C=features_3C, draft_steps=DraftSteps(1, 2, 3), num_rounds_alone=7
    )
    for sent in (reply, more):
        assert_same(sent, codec.unpacked_reply(Line().over(codec.packed_reply(sent))))


@pytest.mark.parametrize("has_rows", [False, True])
def test_passes_arrive_unchanged(has_rows: bool) -> None:
    verify_input = VerifyInput(
        batch=FlatBatch(ints(8, 9, 7), ints(1, 1, 4), ints(3, 4, 0)),
        logits_indices_N=ints(0, 1),
        stream_keys_N=ints(-(2**63), 2**63 - 1),
        target_logits_indices_C=ints(0),
        opened=OPENED if has_rows else NOTHING_OPENED,
        prompts=PromptTokens(ints(2), ints(151_000)),
    )
    arrays = Line().over(codec.packed_pass(UPDATES, verify_input, has_rows=has_rows))
    updates, received = codec.unpacked_pass(arrays)
    assert_same(UPDATES, updates)
    assert_same(verify_input, received)
