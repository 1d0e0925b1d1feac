"""A replica whose draft, in the target's process, is checked after every round."""

from __future__ import annotations

from abc import abstractmethod
from typing import cast

from specdist.engine.draft.client import Draft, InProcess
from specdist.engine.draft.steps.draft_state import DraftState
from specdist.engine.messages.interfaces import Proposer
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.times.timeline import Timeline
from tests.engine.harness import Harness
from tests.engine.markov import MarkovRunner


class CheckedReplica(Harness):
    """On a Markov pair. The draft is asked as ever; afterwards ``check`` looks at its state, and at its
    cache, which tells the tokens that it was written with.

    Attributes:
        num_checked: how much ``check`` has compared, which it counts itself.
    """

    num_checked = 0

    @abstractmethod
    def check(self, state: DraftState, request: ProposalRequest, reply: ProposalReply) -> None: ...

    @property
    def draft_runner(self) -> MarkovRunner:
        return cast(MarkovRunner, self.runners[1])

    def proposer(self) -> Proposer:
        draft = super().proposer()
        assert isinstance(draft, Draft) and isinstance(draft._channel, InProcess)
        state, propose = draft._channel._draft._draft_state, draft.propose

        def checked(request: ProposalRequest, clock: Timeline) -> ProposalReply:
            reply = propose(request, clock)
            self.check(state, request, reply)
            return reply

        draft.propose = checked  # type: ignore[method-assign]
        return draft
