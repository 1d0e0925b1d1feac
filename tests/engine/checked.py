"""A replica whose draft, in the target's process, is checked after every round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, cast

from specdist.engine.draft.client import Draft, InProcess
from specdist.engine.draft.steps.draft_state import DraftState
from specdist.engine.messages.interfaces import Proposer
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.times.timeline import Timeline
from tests.engine.harness import Harness
from tests.engine.markov import MarkovRunner


class CheckedDraft(ABC):
    """The draft of a Markov pair, asked as ever; afterwards ``check`` looks at its cache.

    Attributes:
        runner: the draft's, whose cache tells which tokens it was written with.
        num_checked: how much ``check`` has compared, which it counts itself.
    """

    def __init__(self, inner: Proposer, runner: MarkovRunner) -> None:
        self._inner, self.runner = inner, runner
        assert isinstance(inner, Draft) and isinstance(inner._channel, InProcess)
        self._worker = inner._channel._draft
        self.num_checked = 0

    @abstractmethod
    def check(self, request: ProposalRequest, reply: ProposalReply) -> None: ...

    @property
    def state(self) -> DraftState:
        return self._worker._draft_state

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        reply = self._inner.propose(request, clock)
        self.check(request, reply)
        return reply

    def close(self) -> None:
        self._inner.close()


class CheckedReplica(Harness):
    """A replica whose draft is checked; subclasses say how."""

    checks: ClassVar[type[CheckedDraft]]
    checked: CheckedDraft

    def proposer(self) -> Proposer:
        self.checked = self.checks(super().proposer(), cast(MarkovRunner, self.runners[1]))
        return self.checked
