"""Requests of several target groups as one request to their draft, and its reply as one for each group.

Every group numbers its slots and pages from 0. For the draft they stand side by side, so that nothing but
the passes is shared: group g has the slots from ``g * num_slots`` on and the pages from ``g * num_pages`` on.
Random numbers are keyed by what a group's own sequences say.

R sequences that decode, W of them whose next token is sampled, C candidates of all of them, P passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from specdist.cache.pages import PageUpdates
from specdist.engine.opened import OpenedSequences
from specdist.engine.proposals import ProposalReply, ProposalRequest
from specdist.engine.reports import NO_DRAFT_STEPS, AheadReport, RoleTimes, TracedDrafts
from specdist.models.flat import FlatBatch
from specdist.sampling.distributions import Dense

_PER_SEQUENCE = ("num_accepted_R", "next_token_ids_R", "draft_now_R", "num_redraft_R")


@dataclass(frozen=True, kw_only=True)
class GroupSizes:
    """What every target group of a draft may use."""

    num_groups: int
    num_slots: int
    num_pages: int

    def shifted(self, request: ProposalRequest, group: int) -> ProposalRequest:
        """A group's request, in the numbers of the draft. Raises ValueError for a slot or page that is not
        the group's."""
        first_slot, first_page = group * self.num_slots, group * self.num_pages
        updates, opened = request.page_updates, request.opened

        def slots(values: np.ndarray) -> np.ndarray:
            return first_slot + _checked(values, self.num_slots, "slot")

        return dataclasses.replace(
            request,
            page_updates=PageUpdates(
                slots(updates.slots),
                updates.indices,
                first_page + _checked(updates.pages, self.num_pages, "page"),
            ),
            slots_R=slots(request.slots_R),
            suspended_slots=slots(request.suspended_slots),
            opened=dataclasses.replace(opened, slots=slots(opened.slots)),
            context=_moved(request.context, slots(request.context.slots_T)),
            missed=_moved(request.missed, slots(request.missed.slots_T)),
            groups=(group,),
        )


class BurstCount:
    """How many bursts the draft has in a round of all target groups that have asked lately."""

    def __init__(self) -> None:
        self._bursts_ago: dict[int, int] = {}

    def add(self, groups: tuple[int, ...]) -> float:
        """A burst for these; the bursts of a round, if each is for as many."""
        if self._bursts_ago.keys() == set(groups):
            self._bursts_ago = dict.fromkeys(groups, 0)
            return 1.0
        self._bursts_ago = {group: ago + 1 for group, ago in self._bursts_ago.items()}
        self._bursts_ago |= dict.fromkeys(groups, 0)
        num_at_work = sum(ago <= len(self._bursts_ago) for ago in self._bursts_ago.values())
        return num_at_work / len(groups)


def merged(requests: Sequence[ProposalRequest]) -> ProposalRequest:
    """One request of requests that are shifted already."""
    if len(requests) == 1:
        return requests[0]
    distributions = [request.next_distributions_W for request in requests]
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(request, name) for request in requests]) for name in _PER_SEQUENCE
    }
    dense = [each.probabilities_NV for each in distributions if isinstance(each, Dense)]
    return ProposalRequest(
        page_updates=PageUpdates(
            *(np.concatenate([getattr(request.page_updates, name) for request in requests])
              for name in ("slots", "indices", "pages"))
        ),
        slots_R=np.concatenate([request.slots_R for request in requests]),
        suspended_slots=np.concatenate([request.suspended_slots for request in requests]),
        opened=OpenedSequences(
            **{
                field.name: np.concatenate([getattr(request.opened, field.name) for request in requests])
                for field in dataclasses.fields(OpenedSequences)
            }
        ),
        context=_joined([request.context for request in requests]),
        missed=_joined([request.missed for request in requests]),
        num_prefill_tokens=sum(request.num_prefill_tokens for request in requests),
        next_distributions_W=Dense(torch.cat(dense)) if dense else None,
        groups=tuple(group for request in requests for group in request.groups),
        **columns,
    )  # fmt: skip


def split(reply: ProposalReply, num_seqs: Sequence[int]) -> list[ProposalReply]:
    """The reply to :func:`merged` requests of so many sequences that decode.

    Passes and times belong to all groups. They are the first one's, so that they count once.
    """
    if len(num_seqs) == 1:
        return [reply]
    candidates_before = np.r_[0, np.cumsum(reply.num_drafted_R)]
    bounds = np.r_[0, np.cumsum(num_seqs)].tolist()
    parts: list[ProposalReply] = []
    for begin, end in pairwise(bounds):
        own, of_own = slice(begin, end), slice(candidates_before[begin], candidates_before[end])
        report = reply.ahead
        part = ProposalReply(
            next_token_ids_R=reply.next_token_ids_R[own],
            num_drafted_R=reply.num_drafted_R[own],
            candidate_ids_C=reply.candidate_ids_C[of_own],
            draft_probabilities_C=reply.draft_probabilities_C[of_own],
            ahead=AheadReport(
                **{field.name: getattr(report, field.name)[own] for field in dataclasses.fields(report)}
            ),
            draft_pass_sizes_P=reply.draft_pass_sizes_P[:0] if parts else reply.draft_pass_sizes_P,
            draft_steps=NO_DRAFT_STEPS if parts else reply.draft_steps,
            times=RoleTimes(peak_memory_bytes=reply.times.peak_memory_bytes) if parts else reply.times,
            num_rounds_alone=reply.num_rounds_alone,
            traced=_traced(reply.traced, own, of_own),
        )
        parts.append(part)
    return parts


def _traced(traced: TracedDrafts | None, own: slice, of_own: slice) -> TracedDrafts | None:
    if traced is None:
        return None
    return TracedDrafts(
        features_4C=traced.features_4C[:, of_own],
        is_verified_R=traced.is_verified_R[own],
        is_hit_R=traced.is_hit_R[own],
        token_ids_R=traced.token_ids_R[own],
        features_4R=traced.features_4R[:, own],
        acceptance_R=traced.acceptance_R[own],
    )


def _checked(values: np.ndarray, size: int, what: str) -> np.ndarray:
    if len(values) and not (values.min() >= 0 and values.max() < size):
        raise ValueError(f"{what} {int(values.max())} of a target group that has {size} of them")
    return values


def _moved(batch: FlatBatch, slots_T: np.ndarray) -> FlatBatch:
    return FlatBatch(batch.token_ids_T, slots_T, batch.positions_T)


def _joined(batches: Sequence[FlatBatch]) -> FlatBatch:
    return FlatBatch(
        *(np.concatenate([np.asarray(getattr(batch, name)) for batch in batches])
          for name in ("token_ids_T", "slots_T", "positions_T"))
    )  # fmt: skip
