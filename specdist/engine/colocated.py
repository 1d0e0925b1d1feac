"""The draft in the target's own process, on the same device."""

from __future__ import annotations

from specdist.engine.draft_worker import DraftWorker
from specdist.engine.proposals import ProposalReply, ProposalRequest
from specdist.engine.timeline import Timeline


class ColocatedDraft:
    """The proposer of a draft in the target's own process: target and draft take turns."""

    def __init__(self, draft: DraftWorker) -> None:
        self._draft = draft

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        del clock  # the target is idle all the while
        try:
            reply = self._draft.respond(request)
            self._draft.prefill_and_draft_ahead(request)
        except (RuntimeError, MemoryError):
            self._draft.recover(has_replied=False)
            raise
        return reply

    def close(self) -> None:
        """Nothing to do: no other rank waits."""
