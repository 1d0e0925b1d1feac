"""When the draft learns of verified tokens: while the target is at work, if nothing is drafted before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from specdist.engine.draft.draft_worker import DraftWorker
from specdist.engine.draft.steps import draft_loop
from specdist.engine.draft.steps.draft_loop import DraftLoop
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.policies import DraftFeatures, DraftSequences, RoundContext, VerifiedTokens, WithoutHistory
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import Harness, requests_for
from tests.engine.markov import markov_pair

REPLY, LEARN, DRAFT, GIVE, RECEIVE = "reply", "learn", "draft", "give", "receive"


@dataclass
class Noting(WithoutHistory):
    """Drafts as much as it may, and notes what it is asked and told."""

    max_draft_tokens: int = 3
    uses_features: bool = True
    reads_head: bool = False
    events: list[str] = field(default_factory=list)
    num_verified: int = 0

    def wants_more(self, rows: DraftSequences) -> np.ndarray:
        if rows.num_drafted == 0:
            self.events.append(DRAFT)
        return np.full(len(rows.slots_R), rows.num_drafted < self.max_draft_tokens)

    def num_to_verify(
        self, features: DraftFeatures, lengths_R: np.ndarray, round: RoundContext
    ) -> np.ndarray:
        return lengths_R

    def observe_tokens(self, tokens: VerifiedTokens) -> None:
        if len(tokens.depths_C):
            # Of every token, also one in whose place the target's own stands by now.
            assert np.isfinite(tokens.features.entropies_R).all()
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

    def noted_give(self: DraftLoop, *arguments: Any) -> Any:
        policy.events.append(GIVE)
        return give(self, *arguments)

    def noted_receive(self: DraftLoop, *arguments: Any) -> Any:
        policy.events.append(RECEIVE)
        return receive(self, *arguments)

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
