"""Verdicts of a target whose ranks hold a slice of the vocabulary each: [N, V] is nowhere built or sent.

What crosses between the ranks in a pass, beside the announcement of the pass itself:

- greedy, and coupled draws: the best token of every slice and its height, 2 numbers per asked token;
- rejection: one log-normaliser per slice and asked token, one score per slice and candidate; and once the
  lead has counted what it accepts, the places of the decisions (an int per asked token) and the logits there;
- with top-k first the k largest scores of every slice, of which every rank finds the same threshold;
- with top-p the whole rows, at the lead alone: where the nucleus ends, among equal scores too, depends on the
  order of all ids.

Only the lead decides anything, so the ranks cannot disagree.

N asked tokens, v ids of this rank's slice, w of the widest, V of all, S slices, K of top-k, C candidates,
W places that are decided.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdist.engine.collectives import Collectives
from specdist.engine.verdicts import KnownLaws, Questions, Verdicts
from specdist.sampling.distributions import (
    Distributions,
    SamplingSettings,
    distributions_from_logits,
    tempered,
)
from specdist.sampling.slices import (
    candidate_probabilities,
    likeliest,
    log_normalisers,
    merge_winners,
    own_scores,
    race_winners,
    top_scores,
    vocabulary_slices,
    without_the_rest,
)

NO_DECISION = -1


class SlicedVocabulary:
    """One rank's part in judging: the lead's gives verdicts, the others' give the lead what it needs."""

    def __init__(self, collectives: Collectives, *, settings: SamplingSettings, vocab_size: int) -> None:
        self._collectives = collectives
        self._settings = settings
        self._slices = vocabulary_slices(vocab_size, collectives.size)
        self._ids = self._slices[collectives.rank]
        self._vocab_size = vocab_size

    @property
    def _fetches_decisions(self) -> bool:
        """The lead does not have the decisions' laws yet when it has the candidates' probabilities."""
        return self._settings.is_random and self._settings.top_p == 1

    def judge(self, logits_Nv: Tensor, questions: Questions) -> Verdicts | None:
        """The lead's verdicts on a pass; None on the other ranks: :meth:`follow_decisions` comes next."""
        settings = self._settings
        if not len(logits_Nv):
            # Nothing is asked, and nothing exchanged.
            return KnownLaws.of(logits_Nv.new_empty(0, self._vocab_size), settings, questions)
        if self._fetches_decisions:
            return self._judge_by_rejection(logits_Nv, questions)
        if settings.top_p < 1 and not settings.is_greedy:
            logits_NV = self._gather_rows(logits_Nv)
            return None if logits_NV is None else KnownLaws.of(logits_NV, settings, questions)
        packed_S2N = self._collectives.gather(self._winners(logits_Nv, questions))
        return None if packed_S2N is None else KnownLaws(merge_winners(packed_S2N), questions)

    def decide(self, logits_Nv: Tensor, index_W: np.ndarray) -> Distributions:
        """The laws at these of the N places, at the lead, while the others :meth:`follow_decisions`.

        They are made of the whole logits, so that they are those of an unsharded model bit by bit.
        """
        index_N = torch.full((len(logits_Nv),), NO_DECISION, dtype=torch.int32)
        index_N[: len(index_W)] = torch.from_numpy(index_W)
        self._collectives.from_lead(index_N)
        logits_WV = self._gather_rows(logits_Nv[torch.from_numpy(index_W).to(logits_Nv.device)])
        assert logits_WV is not None
        return distributions_from_logits(logits_WV, self._settings)

    def follow_decisions(self, logits_Nv: Tensor) -> None:
        """Give the lead the rows that it decides about, where it does not have them."""
        if not len(logits_Nv) or not self._fetches_decisions:
            return
        index_N = self._collectives.from_lead(torch.empty(len(logits_Nv), dtype=torch.int32))
        self._gather_rows(logits_Nv[index_N[index_N != NO_DECISION].to(logits_Nv.device)])

    def _gather_rows(self, rows_Wv: Tensor) -> Tensor | None:
        """Whole rows [W, V] at the lead, in the logits' own precision."""
        widest = len(self._slices[0])
        padded_Ww = torch.nn.functional.pad(rows_Wv, (0, widest - len(self._ids)))
        gathered_SWw = self._collectives.gather(padded_Ww)
        if gathered_SWw is None:
            return None
        parts = [rows_Ww[:, : len(ids)] for rows_Ww, ids in zip(gathered_SWw, self._slices, strict=True)]
        return torch.cat(parts, dim=1)

    def _winners(self, logits_Nv: Tensor, questions: Questions) -> Tensor:
        if self._settings.is_greedy:
            return likeliest(logits_Nv, self._ids).packed()
        return race_winners(
            self._scores(logits_Nv),
            self._ids,
            torch.from_numpy(questions.stream_keys_N),
            torch.from_numpy(questions.positions_N),
        ).packed()

    def _scores(self, logits_Nv: Tensor) -> Tensor:
        """After temperature and top-k."""
        scores_Nv = tempered(logits_Nv, self._settings)
        top_k = self._settings.top_k
        if not 0 < top_k < self._vocab_size:
            return scores_Nv
        return without_the_rest(scores_Nv, self._collectives.gather_everywhere(top_scores(scores_Nv, top_k)))

    def _judge_by_rejection(self, logits_Nv: Tensor, questions: Questions) -> Verdicts | None:
        scores_Nv = self._scores(logits_Nv)
        judges_C = torch.from_numpy(questions.judges_C).to(scores_Nv.device)
        candidate_ids_C = torch.from_numpy(questions.candidate_ids_C).to(scores_Nv.device)
        own_C = own_scores(scores_Nv, self._ids, judges_C, candidate_ids_C)
        gathered = self._collectives.gather(torch.cat([log_normalisers(scores_Nv), own_C]))
        if gathered is None:
            return None
        normalisers_SN, scores_SC = gathered.split([len(logits_Nv), len(judges_C)], dim=1)
        return _RejectionVerdicts(
            candidate_probabilities(normalisers_SN, scores_SC, judges_C).cpu(), self, logits_Nv
        )


@dataclass(frozen=True)
class _RejectionVerdicts:
    """The candidates' probabilities are known; the decisions' rows are fetched when their places are."""

    probabilities_C: Tensor
    vocabulary: SlicedVocabulary
    logits_Nv: Tensor

    def candidate_probabilities(self) -> Tensor:
        return self.probabilities_C

    def decisions(self, index_W: np.ndarray) -> Distributions:
        return self.vocabulary.decide(self.logits_Nv, index_W)
