"""When the draft learns of verified tokens: while the target is at work, if nothing is drafted before; and
where the policy's state of a row is kept: in its slot, and aside while the row is preempted."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from specdist.engine.draft.draft_worker import DraftWorker
from specdist.engine.draft.steps.policy_state import PolicyState
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.policies import DraftSequences, FixedLength, LengthPolicy, VerifiedTokens
from specdist.policies.lengths.counted import HfHeuristic
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import Harness, requests_for
from tests.engine.markov import markov_pair

REPLY, LEARN, DRAFT = "reply", "learn", "draft"


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
