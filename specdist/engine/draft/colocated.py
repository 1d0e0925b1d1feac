"""The draft in the process of the target or of its rank 0, on the same device."""

from __future__ import annotations

from specdist.engine.draft.draft_worker import DraftWorker
from specdist.engine.faults import DraftOutOfMemory, is_out_of_memory
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.times.timeline import Timeline
from specdist.utils.errors import first_line


class ColocatedDraft:
    """The proposer of a draft that takes turns with the target. Other ranks of the target have no part in it:
    they wait for the next pass to be announced."""

    def __init__(self, draft: DraftWorker) -> None:
        self._draft = draft

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        del clock  # the target is idle all the while
        try:
            reply = self._draft.respond(request)
            self._draft.prefill_and_draft_ahead(request)
        except (RuntimeError, MemoryError) as error:
            self._draft.recover(has_replied=False)
            if is_out_of_memory(error):
                raise DraftOutOfMemory(f"draft: {first_line(error)}") from error
            raise
        return reply

    def tell(self, request: ProposalRequest) -> None:
        """Of a round in which it is not asked."""
        self._draft.follow(request)

    def close(self) -> None:
        """Nothing to do: no other rank waits."""
