"""The ranks of a collection: rank 0 announces each task, and the others do it.

In generation all ranks serve the engine. Otherwise only rank 0 knows the texts: it asks the draft's rank to
draw and to complete, and runs passes that the target's other ranks follow.

N places whose distribution is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from specdist.engine.assembly import PAGE_SIZE
from specdist.engine.messages.interfaces import Target, VerifyInput
from specdist.engine.request import Request
from specdist.engine.target.sharded_target import RANK_ZERO
from specdist.job.ranks.signals import StopRequest
from specdist.job.ranks.topology import Topology, broadcast_from_rank0
from specdist.job.recording.assignments import follow_assignments
from specdist.job.replica.replica import Replica
from specdist.models.cache.pages import PageUpdates
from specdist.models.heads.examples import ExampleBlock
from specdist.training.collect.draft_side import DraftSide
from specdist.training.collect.texts import Text, contexts_of, groups_of, in_passes, pages_of
from specdist.utils.errors import UserError

# Objects travel over gloo, on a GPU's replica too.
HOST = torch.device("cpu")


@dataclass(frozen=True)
class Task:
    """``generate``: follow the turns of a run; ``serve``: serve rank 0's engine; ``follow``: follow passes of
    the target; the others are for the draft."""

    name: Literal["generate", "serve", "follow", "complete", "score", "end"]
    argument: Any = None


class Conductor:
    """Rank 0's side. ``draft`` is given if rank 0 also holds the draft."""

    def __init__(self, replica: Replica, topology: Topology, draft: DraftSide | None) -> None:
        self._replica = replica
        self._topology = topology
        self._draft = draft

    def begin_run(self) -> None:
        """The other ranks follow the turns of a run, until its end."""
        self._announce(Task("generate"))

    def begin_generation(self) -> None:
        """The other ranks serve an engine, until its end."""
        self._announce(Task("serve"))

    def begin_passes(self) -> TargetSide:
        """The target, for passes that the other ranks follow until it is closed."""
        self._announce(Task("follow"))
        return TargetSide(
            self._replica.rank0_target(), num_slots=self._replica.num_slots, num_pages=self._replica.num_pages
        )

    def complete_by_draft(self, requests: list[Request]) -> dict[int, list[int]]:
        """See :meth:`DraftSide.complete`."""
        return self._draft.complete(requests) if self._draft else self._ask(Task("complete", requests))

    def draw(self, texts: Sequence[Text]) -> list[ExampleBlock]:
        """See :meth:`DraftSide.score`."""
        return self._draft.score(texts) if self._draft else self._ask(Task("score", texts))

    def end(self) -> None:
        self._announce(Task("end"))

    def _announce(self, task: Task) -> None:
        broadcast_from_rank0(self._topology, task)

    def _ask(self, task: Task) -> Any:
        self._announce(task)
        _raise_if_refused(None, self._topology)
        answer: list[Any] = [None]
        dist.recv_object_list(answer, self._topology.draft_rank, device=HOST)
        return answer[0]


def follow_conductor(
    replica: Replica, topology: Topology, draft: DraftSide | None, stop: StopRequest
) -> None:
    """The loop of all other ranks; ``draft`` is given on the rank that holds the draft."""
    while (task := broadcast_from_rank0(topology, None)).name != "end":
        if task.name == "generate":
            follow_assignments(topology, replica, stop)
        elif task.name == "serve" or (task.name == "follow" and topology.holds_target):
            replica.serve()
        elif task.name in ("complete", "score"):
            answer, message = None, None
            if draft is not None:
                try:
                    answer = (draft.complete if task.name == "complete" else draft.score)(task.argument)
                except UserError as error:
                    message = str(error)
            _raise_if_refused(message, topology)
            if draft is not None:
                dist.send_object_list([answer], RANK_ZERO, device=HOST)


def _raise_if_refused(message: str | None, topology: Topology) -> None:
    """Raise the draft rank's error on all ranks."""
    box = [message]
    dist.broadcast_object_list(box, topology.draft_rank, device=HOST)
    if box[0] is not None:
        raise UserError(box[0])


class TargetSide:
    """Rank 0's view of the target, whose other ranks follow its passes."""

    def __init__(self, target: Target, *, num_slots: int, num_pages: int) -> None:
        self._target = target
        self._num_slots = num_slots
        self._num_pages = num_pages

    def probabilities(self, texts: Sequence[Text], drafted: Sequence[ExampleBlock]) -> list[np.ndarray]:
        """P of each text's draft tokens after the text's own tokens, float64."""
        asked = [
            dataclasses.replace(text, places_N=found.positions_M)
            for text, found in zip(texts, drafted, strict=True)
        ]
        token_ids = np.concatenate([found.token_ids_M for found in drafted])
        groups = groups_of(asked, num_slots=self._num_slots, num_pages=self._num_pages, page_size=PAGE_SIZE)
        answers, begin = [], 0
        for group in groups:
            end = begin + sum(len(text.places_N) for text in group)
            answers.append(self._ask(group, token_ids[begin:end]))
            begin = end
        ends = np.cumsum([len(found.token_ids_M) for found in drafted])
        return np.split(np.concatenate(answers), ends[:-1])

    def close(self) -> None:
        """End the passes that the other ranks follow."""
        self._target.close()

    def _ask(self, group: Sequence[Text], token_ids_N: np.ndarray) -> np.ndarray:
        updates = pages_of(group, PAGE_SIZE)
        answers, begin = [np.zeros(0)], 0
        for part in in_passes(contexts_of(group)):
            num_asked = len(part.index_N)
            verify_input = VerifyInput(
                batch=part.batch,
                logits_indices_N=part.index_N,
                # Nothing is drawn here.
                stream_keys_N=np.zeros(num_asked, np.int64),
                target_logits_indices_C=np.zeros(0, np.int64),
            )
            verify_output = self._target.forward(updates, verify_input)
            updates = PageUpdates.from_entries([])
            if num_asked:
                distributions_N = verify_output.next_distributions(np.arange(num_asked))
                ids_N = torch.from_numpy(token_ids_N[begin : begin + num_asked]).to(distributions_N.device)
                answers.append(distributions_N.probabilities_of(ids_N).cpu().numpy())
            begin += num_asked
        return np.concatenate(answers)
