"""The draft on a rank of its own: the proposer that asks it, and the loop in which it answers.

Target → draft: counts, next tokens and context tokens as one message of integers, and one probability row
for each row whose next token is to be drawn. Draft → target: token ids and the scalar probability of each
candidate. Messages carry the number of the target group that they belong to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch

from specdist.cache.pages import PageUpdates
from specdist.engine.draft_worker import DraftWorker
from specdist.engine.faults import DraftOutOfMemory, first_line, is_out_of_memory
from specdist.engine.proposals import (
    DRAW,
    OpenedRows,
    ProposalReply,
    ProposalRequest,
    RoleTimes,
    TracedDrafts,
    Traffic,
)
from specdist.engine.timeline import Timeline
from specdist.engine.wire import as_ints, wire_from, wire_to
from specdist.models.flat import FlatBatch
from specdist.sampling.distributions import Dense

REQUEST, CLOSE = 0, 1


class RemoteDraft:
    """The proposer in the target's lead process."""

    def __init__(self, draft_rank: int, *, group: int = 0) -> None:
        self._group = group
        self._requests = wire_to(draft_rank)
        self._replies = wire_from(draft_rank)

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        before = self._traffic()
        # Idle: gloo's send ends when the receiver asks for the message, and a draft that works ahead is busy.
        self._requests.send([np.array([REQUEST, self._group]), *_request_arrays(request)])
        if request.next_distributions_W is not None:
            assert isinstance(request.next_distributions_W, Dense)
            with clock.phase("transfer"):
                self._requests.transfer(request.next_distributions_W.probabilities_NV.contiguous())
        arrays = self._replies.receive()
        if len(arrays) == 1:
            raise DraftOutOfMemory(arrays[0].astype(np.uint8).tobytes().decode())
        with clock.phase("transfer"):
            reply = _reply_from_arrays(arrays)
        return dataclasses.replace(reply, traffic=self._traffic() - before)

    def _traffic(self) -> Traffic:
        wires = (self._requests, self._replies)
        return Traffic(sum(wire.num_messages for wire in wires), sum(wire.num_bytes for wire in wires))

    def close(self) -> None:
        self._requests.send([np.array([CLOSE, self._group])])


def serve_drafts(drafts: Mapping[int, DraftWorker], rank0: int, *, vocab_size: int, clock: Timeline) -> None:
    """Answer requests until every target group has closed. The contexts are run after the answer is sent,
    while the target is busy with its pass.

    ``clock`` is that of all the drafts; what is in no phase is transfer. A reply to one group carries the
    times since the last reply to any. A request for which memory does not suffice is answered with the error;
    so is the next one, where the work after an answer has failed.
    """
    requests, replies = wire_from(rank0), wire_to(rank0)
    is_open = set(drafts)
    complaints: dict[int, str] = {}
    clock.restart()
    while is_open:
        with clock.phase("idle"):
            arrays = requests.receive()
        kind, group = arrays[0].tolist()
        if kind == CLOSE:
            is_open.remove(group)
            continue
        draft = drafts[group]
        request = _request_from_arrays(arrays[1:])
        num_drawn = int((request.next_token_ids_R == DRAW).sum())
        if num_drawn:
            rows_WV = torch.empty(num_drawn, vocab_size, dtype=torch.float32, device=draft.device)
            requests.transfer(rows_WV)
            request = dataclasses.replace(request, next_distributions_W=Dense(rows_WV))
        has_replied = False
        try:
            if group not in complaints:
                replies.send(_reply_arrays(draft.respond(request)))
                has_replied = True
                draft.follow(request)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            complaints[group] = f"draft: {first_line(error)}"
            draft.abandon(is_heard=has_replied)
        if group in complaints and not has_replied:
            replies.send([np.frombuffer(complaints.pop(group).encode(), np.uint8)])


def _request_arrays(request: ProposalRequest) -> list[np.ndarray]:
    updates, opened, context = request.page_updates, request.opened, request.context
    return [
        updates.slots,
        updates.indices,
        updates.pages,
        request.slots_R,
        request.num_accepted_R,
        request.next_token_ids_R,
        request.draft_now_R,
        request.suspended_slots,
        opened.slots,
        as_ints(opened.stream_keys),
        opened.num_misses,
        opened.context_lengths,
        opened.max_lengths,
        np.asarray(context.token_ids_T),
        context.slots_T,
        context.positions_T,
    ]


def _request_from_arrays(arrays: list[np.ndarray]) -> ProposalRequest:
    (update_slots, indices, pages, slots, accepted, next_distributions, draft_now, suspended_slots, opened_slots, keys,
     num_misses, context_lengths, max_lengths, token_ids, context_slots, positions) = arrays  # fmt: skip
    return ProposalRequest(
        page_updates=PageUpdates(update_slots, indices, pages),
        slots_R=slots.astype(np.int64),
        num_accepted_R=accepted.astype(np.int64),
        next_token_ids_R=next_distributions.astype(np.int64),
        draft_now_R=draft_now,
        next_distributions_W=None,
        suspended_slots=suspended_slots,
        opened=OpenedRows(
            slots=opened_slots,
            stream_keys=keys.view(np.int64),
            num_misses=num_misses,
            context_lengths=context_lengths,
            max_lengths=max_lengths,
        ),
        context=FlatBatch(
            token_ids.astype(np.int64), context_slots.astype(np.int64), positions.astype(np.int64)
        ),
    )


def _reply_arrays(reply: ProposalReply) -> list[np.ndarray]:
    times = np.array(dataclasses.astuple(reply.times), np.int64)
    return [
        reply.next_token_ids_R,
        reply.num_drafted_R,
        reply.candidate_ids_C,
        # Exact: they are entries of a float32 distribution.
        as_ints(reply.draft_probabilities_C.astype(np.float32)),
        reply.num_ahead_R,
        reply.is_hit_R,
        reply.num_branches_R,
        reply.num_branch_tokens_R,
        reply.branch_ranks_R,
        reply.draft_pass_sizes_P,
        as_ints(times),
        np.array([reply.num_head_tokens]),
        *(_traced_arrays(reply.traced) if reply.traced is not None else []),
    ]


def _reply_from_arrays(arrays: list[np.ndarray]) -> ProposalReply:
    (next_distributions, num_drafted, candidates, probabilities, num_ahead, is_hit, num_branches, num_branch_tokens,
     branch_ranks, pass_sizes, times, num_head_tokens, *traced) = arrays  # fmt: skip
    return ProposalReply(
        next_token_ids_R=next_distributions.astype(np.int64),
        num_drafted_R=num_drafted.astype(np.int64),
        candidate_ids_C=candidates.astype(np.int64),
        draft_probabilities_C=probabilities.view(np.float32).astype(np.float64),
        num_ahead_R=num_ahead.astype(np.int64),
        is_hit_R=is_hit.astype(bool),
        num_branches_R=num_branches.astype(np.int64),
        num_branch_tokens_R=num_branch_tokens.astype(np.int64),
        branch_ranks_R=branch_ranks.astype(np.int64),
        draft_pass_sizes_P=pass_sizes.astype(np.int64),
        times=RoleTimes(*times.view(np.int64).tolist()),
        num_head_tokens=int(num_head_tokens[0]),
        traced=_traced_from_arrays(traced, is_hit.astype(bool)) if traced else None,
    )


def _traced_arrays(traced: TracedDrafts) -> list[np.ndarray]:
    """Features are single precision where they are kept."""
    floats = traced.features_4C, traced.features_4R, traced.acceptance_R
    packed = [as_ints(values.astype(np.float32).ravel()) for values in floats]
    return [traced.is_verified_R, traced.token_ids_R, *packed]


def _traced_from_arrays(arrays: list[np.ndarray], is_hit_R: np.ndarray) -> TracedDrafts:
    is_verified, token_ids, *floats = arrays
    features_C, features_R, acceptance_R = (values.view(np.float32).astype(np.float64) for values in floats)
    return TracedDrafts(
        features_4C=features_C.reshape(4, -1),
        is_verified_R=is_verified.astype(bool),
        is_hit_R=is_hit_R,
        token_ids_R=token_ids.astype(np.int64),
        features_4R=features_R.reshape(4, -1),
        acceptance_R=acceptance_R,
    )
