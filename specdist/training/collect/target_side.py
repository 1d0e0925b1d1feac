"""The target's part of a collection: its probabilities of the draft tokens.

N places whose distribution is needed, T flat tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from specdist.engine.assembly import PAGE_SIZE
from specdist.engine.messages.interfaces import Target, VerifyInput
from specdist.models.cache.pages import PageUpdates
from specdist.training.collect.draft_side import Drafted
from specdist.training.collect.passes import contexts_of, groups_of, in_passes, pages_of
from specdist.training.collect.texts import Text


class TargetSide:
    """Rank 0's view of the target, whose other ranks follow its passes."""

    def __init__(self, target: Target, *, num_slots: int, num_pages: int) -> None:
        self._target = target
        self._num_slots = num_slots
        self._num_pages = num_pages

    def probabilities(self, texts: Sequence[Text], drafted: Sequence[Drafted]) -> list[np.ndarray]:
        """P of each text's draft tokens after the text's own tokens, float64."""
        asked = [
            dataclasses.replace(text, places_N=found.places_M)
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
