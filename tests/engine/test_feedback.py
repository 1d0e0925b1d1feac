"""When the draft learns of verified tokens: while the target is at work, if nothing is drafted before; and
where the policy's state of a row is kept: in its slot, and aside while the row is preempted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from specdist.engine.draft.draft_worker import DraftWorker
from specdist.engine.draft.steps import draft_loop
from specdist.engine.draft.steps.draft_loop import DraftLoop
from specdist.engine.draft.steps.draft_steps import Drafting
from specdist.engine.draft.steps.policy_state import PolicyState
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.policies import (
    DraftFeatures,
    DraftSequences,
    FixedLength,
    HfHeuristic,
    LengthPolicy,
    RoundContext,
    VerifiedTokens,
)
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import Harness, requests_for
from tests.engine.markov import markov_pair

REPLY, LEARN, DRAFT, GIVE, RECEIVE = "reply", "learn", "draft", "give", "receive"


@dataclass
class Noting(LengthPolicy):
    """Drafts as much as it may, and notes what it is asked and told."""

    max_draft_tokens: int = 3
    events: list[str] = field(default_factory=list)
    num_verified: int = 0
    uses_features = True
    is_for_batch = True

    def wants(self, rows: DraftSequences) -> np.ndarray:
        if rows.num_drafted == 0:
            self.events.append(DRAFT)
        return np.full(len(rows.slots_R), self.max_draft_tokens)

    def observe_tokens(self, tokens: VerifiedTokens) -> None:
        if len(tokens.depths_C):
            # Of every token, also one in whose place the target's own stands by now.
            assert np.isfinite(tokens.features.entropies).all()
            self.num_verified += len(tokens.depths_C)
            self.events.append(LEARN)


@pytest.mark.parametrize(("num_ahead", "order"), [(4, [REPLY, LEARN, DRAFT]), (0, [LEARN, DRAFT, REPLY])])
def test_a_draft_replies_before_it_learns_unless_it_has_still_to_draft(
    monkeypatch: pytest.MonkeyPatch, num_ahead: int, order: list[str]
) -> None:
    policy = Noting()
    respond = DraftWorker.respond

    def noted_respond(self: DraftWorker, request: ProposalRequest) -> ProposalReply:
        reply = respond(self, request)
        policy.events.append(REPLY)
        return reply

    monkeypatch.setattr(DraftWorker, "respond", noted_respond)
    replica = Harness(
        *markov_pair(),
        policy=policy,
        num_ahead_tokens=num_ahead,
        max_new_tokens=60,
        settings=SamplingSettings(temperature=1.0),
    )
    replica.generate(requests_for([[1, 2, 3]]))
    events = policy.events
    learned = [index for index, event in enumerate(events) if event == LEARN]
    # But for the end, where nothing is drafted any more, and the draft of the prompt.
    learned = [index for index in learned if 2 <= index < len(events) - 6]
    place = order.index(LEARN)
    assert len(learned) > 5
    assert all(events[index - place : index - place + 3] == order for index in learned)
    stats = replica.stats_recorder.shard(0)
    assert policy.num_verified >= stats.num_accepted_tokens > 5


def test_a_draft_learns_while_its_device_has_something_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Noting()
    give, receive = DraftLoop._give, DraftLoop._receive

    def noted_give(self: DraftLoop, drafting: Drafting) -> None:
        give(self, drafting)
        policy.events.extend([GIVE] * bool(drafting.given))

    def noted_receive(self: DraftLoop, drafting: Drafting) -> Any:
        policy.events.append(RECEIVE)
        return receive(self, drafting)

    monkeypatch.setattr(DraftLoop, "_give", noted_give)
    monkeypatch.setattr(DraftLoop, "_receive", noted_receive)
    monkeypatch.setattr(draft_loop, "waits_after_each_step", lambda *_: False)
    settings = SamplingSettings(temperature=1.0)
    replica = Harness(*markov_pair(), policy=policy, num_ahead_tokens=4, max_new_tokens=60, settings=settings)
    replica.generate(requests_for([[1, 2, 3]]))
    events = policy.events
    learned = [index for index, event in enumerate(events) if event == LEARN]
    orders = [events[index - 1 : index + 3] for index in learned]
    # In a few rounds there is nothing to draft.
    assert orders.count([GIVE, LEARN, RECEIVE, DRAFT]) > 0.6 * len(orders) > 5


class HoldingBack(Noting):
    """Has one token verified at a time, and keeps the others: so a_1 need not be drafted."""

    def num_to_verify(
        self, features: DraftFeatures, lengths_R: np.ndarray, round: RoundContext
    ) -> np.ndarray:
        return np.minimum(lengths_R, 1)


def test_a_draft_learns_of_every_round_before_the_policy_is_asked_also_without_a_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, learned = HoldingBack(max_draft_tokens=6), []
    draft, wants = DraftWorker.prefill_and_draft_ahead, policy.wants
    workers: list[DraftWorker] = []

    def noted(self: DraftWorker, request: ProposalRequest) -> None:
        workers.append(self)
        draft(self, request)

    def asked(rows: DraftSequences) -> np.ndarray:
        learned.extend(worker._feedback._verified is None for worker in workers[-1:])
        return wants(rows)

    monkeypatch.setattr(DraftWorker, "prefill_and_draft_ahead", noted)
    monkeypatch.setattr(policy, "wants", asked)
    settings = SamplingSettings(temperature=1.0)
    replica = Harness(*markov_pair(), policy=policy, num_ahead_tokens=6, max_new_tokens=60, settings=settings)
    replica.generate(requests_for([[1, 2, 3]]))
    assert len(learned) > 20 and all(learned)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def lengths(states: PolicyState) -> list[float]:
    return states.of(np.arange(3))[:, 0].tolist()


def test_states_begin_are_updated_and_move_with_their_rows() -> None:
    states = PolicyState(HfHeuristic(num_draft_tokens=5, max_draft_tokens=20), num_slots=3)
    states.open(ints(2, 0, 1), ints(70, 71, 72))
    states.observe(ints(1, 2), ints(5, 5), ints(5, 0))
    # A row without candidates has no block.
    states.observe(ints(0, 1), ints(0, 7), ints(0, 3))
    states.observe(ints(0), ints(0), ints(0))
    assert lengths(states) == [5, 6, 4]
    # Both rows with a history are preempted, and a new row takes one of their slots in the same round.
    states.suspend(ints(2, 1), ints(70, 72))
    states.open(ints(1), ints(73))
    assert lengths(states)[1] == 5
    states.observe(ints(1), ints(5), ints(5))
    # They come back with their slots exchanged.
    states.open(ints(2, 0), ints(72, 70))
    assert lengths(states) == [4, 7, 6]
    # A saved history is used once: the next row of the stream would begin with a new one.
    states.open(ints(2), ints(72))
    assert lengths(states) == [4, 7, 5]


def test_a_policy_may_have_no_history() -> None:
    states = PolicyState(FixedLength(3), num_slots=2)
    states.open(ints(0), ints(9))
    states.observe(ints(0, 1), ints(3, 0), ints(2, 0))
    states.suspend(ints(0), ints(9))
    assert states.of(ints(1, 0)).shape == (2, 0)
