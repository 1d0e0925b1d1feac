"""A draft in the target's process whose model does nothing where plain decoding is faster.

Its policy says so by drafting nothing for any sequence. Prompts are run when something is to be drafted after
them (:mod:`specdist.engine.draft.late_contexts`). The target then goes on alone for some rounds, and the
draft is only told of the sequences that begin. So a run in which nothing pays costs what the target alone
costs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from specdist.engine.draft.draft_worker import DraftWorker
from specdist.engine.draft.late_contexts import LateContexts
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.models.passes.flat import FlatBatch
from specdist.models.passes.runner import ModelRunner
from specdist.policies import LengthPolicy, PausingPolicy
from specdist.policies.payoff import Pauses


class RestingDraftWorker(DraftWorker):
    """A draft that works in turns, and runs a prompt when something is to be drafted after it; for a policy
    that learns nothing where it drafts nothing."""

    def __init__(
        self,
        runner: ModelRunner,
        policy: LengthPolicy,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        max_context_tokens: int,
        **options: Any,
    ) -> None:
        """``num_pages``, of ``page_size`` tokens: of the page table, which is the target's, too."""
        super().__init__(
            runner, policy, num_slots=num_slots, max_context_tokens=max_context_tokens, **options
        )
        assert isinstance(policy, PausingPolicy) and not self._ahead.is_on
        self._pausing_policy, self._pauses = policy, Pauses()
        self._late_contexts = LateContexts(
            runner,
            self._draft_state,
            num_slots=num_slots,
            num_pages=num_pages,
            page_size=page_size,
            max_tokens=max_context_tokens,
        )
        self._draft_state.run_late_contexts = self._late_contexts.run

    def _respond(self, request: ProposalRequest) -> Callable[..., ProposalReply]:
        self._note_pause(request)
        self._late_contexts.follow(request)
        reply = super()._respond(request)
        has_drafted = bool(self._draft_state.num_candidates[request.slots_R].any())
        # Where there is no room for candidates, the policy has not been asked.
        if not has_drafted and not request.draft_now_R.any():
            return reply
        return partial(reply, num_rounds_alone=self._pauses.after(has_drafted=has_drafted))

    def _run_context(self, context: FlatBatch) -> None:
        self._late_contexts.put_off(context)

    def follow(self, request: ProposalRequest) -> None:
        with self._clock.phase("prefill"):
            self._note_pause(request)
            self._late_contexts.follow(request)
            self._runner.update_pages(request.page_updates)
            self._ahead.take_missed(request.missed)
            self._open_and_prefill(request)
        self._undo.begin()

    def _note_pause(self, request: ProposalRequest) -> None:
        if len(request.missed):
            self._pausing_policy.note_pause(len(request.missed) // max(1, len(request.slots_R)))
