"""Rounds in which the draft is not asked: the same tokens as if it had been."""

from __future__ import annotations

import pytest

from specdist.engine.draft.client import InProcess
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.policies.payoff import RoundShape
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import Harness, requests_for
from tests.engine.test_greedy import prompts_of_lengths
from tests.models.families import noisy_copy, tiny_model

SYNCHRONOUS, PLAIN = RoundShape(drafts_now=True), RoundShape()


def test_the_target_alone_draws_what_the_draft_would_have_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where prompts are admitted and completions end meanwhile."""
    target = tiny_model("llama", seed=3)
    requests = requests_for(prompts_of_lengths(5, 23, 40, 2, 11, 17), num_samples=2)
    asked: list[int] = []
    told: list[int] = []
    ask, tell = InProcess.ask, InProcess.tell

    def counted_ask(self: InProcess, request: ProposalRequest, clock: object) -> ProposalReply:
        asked.append(len(request.missed))
        return ask(self, request, clock)  # type: ignore[arg-type]

    def counted_tell(self: InProcess, request: ProposalRequest | None) -> None:
        if request is not None:
            told.append(len(request.missed))
        tell(self, request)

    monkeypatch.setattr(InProcess, "ask", counted_ask)
    monkeypatch.setattr(InProcess, "tell", counted_tell)
    found, num_asked = [], []
    for shapes in ([SYNCHRONOUS, PLAIN, PLAIN, PLAIN], [SYNCHRONOUS, RoundShape(num_rounds_alone=2)]):
        asked.clear()
        replica = Harness(
            target,
            noisy_copy(target),
            settings=SamplingSettings(temperature=0.8),
            num_ahead_tokens=1,
            shapes=shapes,
            max_new_tokens=24,
            max_num_seqs=5,
            eos=[7],
        )
        found.append([completion.token_ids for completion in replica.generate(requests)])
        assert replica.stats_recorder.close_shard(0).num_accepted_tokens > 20
        num_asked.append(len(asked))
    assert found[0] == found[1]
    # Half of the rounds are alone; prompts come in some of them.
    assert num_asked[1] == pytest.approx(num_asked[0] / 2, abs=3)
    assert len(told) > 1 and max(asked) > 1
