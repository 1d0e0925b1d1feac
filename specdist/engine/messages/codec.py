"""How messages are sent between ranks: as arrays of words, of a type that both ends know.

Every array of a message costs both ranks some microseconds between two forwards. So what every round has is
an array, and what few rounds have is pickled into the last one.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdist.engine.messages.interfaces import PromptTokens, VerifyInput
from specdist.engine.messages.opened import NOTHING_OPENED
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.messages.target_states import TargetStates
from specdist.engine.times.reports import AheadReport
from specdist.models.batch.flat import FlatBatch
from specdist.models.cache.pages import PageUpdates
from specdist.sampling.distributions import Dense

WORD_BYTES = 8


def packed_request(request: ProposalRequest) -> list[np.ndarray]:
    """The request, which says of its :func:`tensors` how large they are."""
    opened, drawn, states = request.opened, request.next_distributions_W, request.states
    rest = (
        request.num_prefill_tokens,
        opened if len(opened.slots) else None,
        None if drawn is None else tuple(drawn.probabilities_NV.shape),
        None if states is None else states.header,
    )
    return [
        request.slots_R,
        request.num_accepted_R,
        request.next_token_ids_R,
        request.draft_now_R,
        request.num_redraft_R,
        request.suspended_slots,
        *vars(request.page_updates).values(),
        *_columns(request.context),
        *_columns(request.missed),
        pickled(rest),
    ]


def unpacked_request(arrays: list[np.ndarray], device: torch.device) -> ProposalRequest:
    """A request with empty tensors on this device; ``sequences`` and ``meanwhile`` are not sent."""
    num_prefill_tokens, opened, shape_WV, states = unpickled(arrays[15])
    rows_WV = None if shape_WV is None else torch.empty(shape_WV, dtype=torch.float32, device=device)
    return ProposalRequest(
        slots_R=arrays[0],
        num_accepted_R=arrays[1],
        next_token_ids_R=arrays[2],
        draft_now_R=arrays[3],
        num_redraft_R=arrays[4],
        suspended_slots=arrays[5],
        page_updates=PageUpdates(*arrays[6:9]),
        context=FlatBatch(*arrays[9:12]),
        missed=FlatBatch(*arrays[12:15]),
        num_prefill_tokens=num_prefill_tokens,
        opened=opened or NOTHING_OPENED,
        states=None if states is None else TargetStates.of_header(states, device),
        next_distributions_W=None if rows_WV is None else Dense(rows_WV),
    )


def tensors(request: ProposalRequest) -> list[Tensor]:
    """What follows the request: to be sent, or to be received into."""
    found = []
    if request.next_distributions_W is not None:
        found.append(request.next_distributions_W.probabilities_NV.contiguous())
    if request.states is not None:
        found.append(request.states.states_CS.contiguous().view(torch.uint8))
    return found


def packed_reply(reply: ProposalReply) -> list[np.ndarray]:
    """The reply."""
    return [
        reply.next_token_ids_R,
        reply.num_drafted_R,
        reply.candidate_ids_C,
        reply.draft_probabilities_C.view(np.int64),
        reply.draft_pass_sizes_P,
        *vars(reply.ahead).values(),
        pickled((reply.times, reply.draft_steps, reply.num_rounds_alone, reply.features_3C)),
    ]


def unpacked_reply(arrays: list[np.ndarray]) -> ProposalReply:
    """The reply."""
    times, draft_steps, num_rounds_alone, features_3C = unpickled(arrays[10])
    return ProposalReply(
        next_token_ids_R=arrays[0],
        num_drafted_R=arrays[1],
        candidate_ids_C=arrays[2],
        draft_probabilities_C=arrays[3].view(np.float64),
        draft_pass_sizes_P=arrays[4],
        ahead=AheadReport(arrays[5], arrays[6].astype(bool), *arrays[7:10]),
        times=times,
        draft_steps=draft_steps,
        num_rounds_alone=num_rounds_alone,
        features_3C=features_3C,
    )


def packed_pass(updates: PageUpdates, verify_input: VerifyInput, *, has_rows: bool) -> list[np.ndarray]:
    """A pass of the target. ``has_rows``: the ranks are to know what rows ask for."""
    opened = verify_input.opened
    return [
        *vars(updates).values(),
        *_columns(verify_input.batch),
        verify_input.logits_indices_N,
        verify_input.stream_keys_N,
        verify_input.target_logits_indices_C,
        *vars(verify_input.prompts).values(),
        pickled(opened if has_rows and len(opened.slots) else None),
    ]


def unpacked_pass(arrays: list[np.ndarray]) -> tuple[PageUpdates, VerifyInput]:
    """The pass."""
    return PageUpdates(*arrays[:3]), VerifyInput(
        batch=FlatBatch(*arrays[3:6]),
        logits_indices_N=arrays[6],
        stream_keys_N=arrays[7],
        target_logits_indices_C=arrays[8],
        prompts=PromptTokens(*arrays[9:11]),
        opened=unpickled(arrays[11]) or NOTHING_OPENED,
    )


def pickled(value: Any) -> np.ndarray:
    """Words; a pickle says where it ends."""
    content = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return np.frombuffer(content + bytes(-len(content) % WORD_BYTES), np.int64)


def unpickled(words: np.ndarray) -> Any:
    """What was :func:`pickled` by another rank of this run."""
    return pickle.loads(words.data)


def _columns(batch: FlatBatch) -> tuple[Any, ...]:
    """Integers of a batch as the engine makes it."""
    return batch.token_ids_T, batch.slots_T, batch.positions_T
