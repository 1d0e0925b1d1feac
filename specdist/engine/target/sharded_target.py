"""The target on several tensor-parallel ranks: rank 0 announces each pass, all ranks run it, rank 0 verifies.

The output head is vocabulary-parallel: each rank holds a slice of the vocabulary, and logits of shape [N, V]
are neither built nor sent. What the ranks exchange in a pass, besides its announcement:

- greedy, and coupled draws: the best token of every slice and its score, 2 numbers per token;
- rejection: one log-normaliser per slice and token, one score per slice and candidate; and after rank 0 has
  counted the accepted candidates, the positions of the next tokens (an int per token) and the logits there;
- with top-k, first the k largest scores of every slice, from which every rank finds the same threshold;
- of emitted tokens whose log-probabilities are wanted: some sums and scores per token and slice;
- with top-p, the whole logits, to rank 0: where the nucleus ends, among equal scores too, depends on the
  order of all ids.

Only rank 0 verifies, so the ranks cannot disagree.

N tokens whose logits are wanted, v ids of this rank's slice, w of the widest slice, V of all, S slices, K of
top-k, C candidates, W positions whose next token is sampled, T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from specdist.engine.messages.codec import packed_pass, unpacked_pass
from specdist.engine.messages.interfaces import VerifyInput, VerifyOutput
from specdist.engine.messages.link import broadcast_link
from specdist.engine.target.local_target import FullDistributions
from specdist.engine.target.pipeline import LogitsPipeline
from specdist.models.cache.pages import PageUpdates
from specdist.models.passes.runner import ModelRunner
from specdist.sampling.distributions import Distributions, SamplingSettings, distributions_from_logits
from specdist.sampling.logprobs import (
    Logprobs,
    merged_logprobs,
    partial_prompt_scores,
    partial_scores,
    processed_logprobs,
)
from specdist.sampling.processing.processors import MASK_BITS
from specdist.sampling.processing.row_filters import RowFilters, tempered
from specdist.sampling.uploads import upload
from specdist.sampling.vocab_parallel import (
    candidate_probabilities,
    likeliest,
    log_normalisers,
    merge_winners,
    own_scores,
    race_winners,
    top_scores,
    vocab_ranges,
    without_the_rest,
)

# Most arrays that ask for log-probabilities: indices of logits, and token ids. A pass has more.
SCORED_TOKENS = 2
NO_NEXT_TOKEN = -1
# Asks for the log-probabilities of prompts' tokens, which all ranks know.
PROMPTS = np.zeros(1, np.int64)
RANK_ZERO = 0


class Collectives:
    """Collectives of one group. Every rank calls the same ones in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def gather(self, tensor: Tensor) -> Tensor | None:
        """[S, ...]: all ranks' tensors, of equal shapes, on rank 0; None on the others."""
        tensor = tensor.contiguous()
        if self.rank != RANK_ZERO:
            dist.gather(tensor, None, RANK_ZERO, group=self._group)
            return None
        gathered = tensor.new_empty(self.size, *tensor.shape)
        dist.gather(tensor, list(gathered), RANK_ZERO, group=self._group)
        return gathered

    def gather_everywhere(self, tensor: Tensor) -> Tensor:
        """[S, ...]: all ranks' tensors, of equal shapes, on every rank."""
        gathered = tensor.new_empty(self.size, *tensor.shape)
        dist.all_gather(list(gathered), tensor.contiguous(), group=self._group)
        return gathered

    def from_rank0(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, in place."""
        dist.broadcast(tensor, RANK_ZERO, group=self._group)
        return tensor


class VocabParallelVerifier:
    """One rank's part: rank 0 gets a verify output, the others send it what it needs."""

    def __init__(
        self,
        collectives: Collectives,
        *,
        settings: SamplingSettings,
        vocab_size: int,
        pipeline: LogitsPipeline | None = None,
    ) -> None:
        """``pipeline``: this rank's processing of the logits of its slice."""
        self.collectives = collectives
        self._settings = settings
        self._slices = vocab_ranges(vocab_size, collectives.size)
        self._ids = self._slices[collectives.rank]
        self._vocab_size = vocab_size
        self._pipeline = pipeline
        # What this pass has: this rank's logits, what each position is filtered by, and whether by top-p.
        self._logits_Nv = torch.empty(0)
        self._filters: RowFilters | None = None
        # And where log-probabilities are wanted: the logits as the model gave them, what is drawn from, and
        # with top-p, on rank 0, its whole logits. ``tell``: calls the others to :meth:`serve_scores`.
        self._raw_Nv = self._scored_Nv = self._prompt_Pv = torch.empty(0)
        self._prompt_ids_P = np.zeros(0, np.int64)
        self._whole_NV: Tensor | None = None
        self.tell: Callable[[list[np.ndarray]], object] = lambda asked: None
        self._has_top_p = settings.top_p < 1 and not settings.is_greedy

    @property
    def is_processing(self) -> bool:
        """Logits are processed, by what rows ask for."""
        return self._pipeline is not None

    @property
    def _fetches_distributions(self) -> bool:
        """Rank 0 does not have the next tokens' distributions yet when it has the candidates'
        probabilities."""
        return self._settings.is_random and not self._has_top_p

    def verify(self, logits_Rv: Tensor, verify_input: VerifyInput) -> VerifyOutput | None:
        """Rank 0's verify output of a pass, given all its logits. None on the other ranks, which then call
        :meth:`serve_next_distributions`."""
        settings, num_logits = self._settings, len(verify_input.logits_indices_N)
        logits_Nv, self._prompt_Pv = logits_Rv.tensor_split([num_logits])
        self._prompt_ids_P = verify_input.prompts.token_ids_P
        self._raw_Nv = logits_Nv
        if self._pipeline is not None:
            logits_Nv = self._processed(self._pipeline, logits_Nv, verify_input)
        self._logits_Nv = self._scored_Nv = logits_Nv
        if not len(logits_Nv):
            # No logits are wanted, and nothing is exchanged.
            nothing_NV = logits_Nv.new_empty(0, self._vocab_size)
            return FullDistributions.of(nothing_NV, settings, verify_input, scores=self)
        if self._fetches_distributions:
            return self._verify_by_rejection(logits_Nv, verify_input)
        if self._has_top_p:
            logits_NV = self._gather_rows(logits_Nv)
            if logits_NV is None:
                return None
            self._whole_NV = logits_NV if settings.num_logprobs is not None else None
            return FullDistributions.of(logits_NV, settings, verify_input, self._filters, scores=self)
        packed_S2N = self.collectives.gather(self._winners(logits_Nv, verify_input))
        return (
            None if packed_S2N is None else FullDistributions(merge_winners(packed_S2N), verify_input, self)
        )

    def _processed(self, pipeline: LogitsPipeline, logits_Nv: Tensor, verify_input: VerifyInput) -> Tensor:
        """The logits before temperature and filters, whose numbers are noted. Rank 0 sends its masks to
        all."""
        asked = pipeline.asked_of(verify_input)
        if not len(logits_Nv):
            return logits_Nv
        masks_NW = pipeline.masks(asked)
        if pipeline.has_masks:
            if masks_NW is None:
                masks_NW = np.full((len(logits_Nv), -(-self._vocab_size // MASK_BITS)), -1, np.int32)
            masks_NW = self.collectives.from_rank0(torch.from_numpy(masks_NW)).numpy()
        processed = pipeline.process(logits_Nv, asked, masks_NW)
        self._filters = processed.filters
        self._has_top_p = self._filters is not None and self._filters.has_top_p
        return processed.scores_Nv

    def logprobs(self, index_M: np.ndarray, token_ids_M: np.ndarray) -> Logprobs:
        """Log-probabilities, on rank 0, of tokens at these of the N positions; the others run
        :meth:`serve_scores`."""
        self.tell([index_M, token_ids_M])
        places_M, ids_M = upload(self._raw_Nv.device, index_M, token_ids_M)
        processed_M: Tensor | None = None
        if self._has_top_p:
            assert self._whole_NV is not None
            filters = None if self._filters is None else self._filters.select(places_M)
            processed_MV = processed_logprobs(self._whole_NV[places_M], self._settings, filters)
            processed_M = processed_MV.gather(1, ids_M[:, None])[:, 0]
        packed_SMC = self.collectives.gather(self._partial_scores(places_M, ids_M))
        assert packed_SMC is not None
        return merged_logprobs(packed_SMC, self._settings.num_logprobs or 0, processed_M)

    def prompt_logprobs(self) -> Logprobs:
        """Log-probabilities of prompts, on rank 0, as :meth:`logprobs`."""
        self.tell([PROMPTS])
        packed_SPC = self.collectives.gather(self._prompt_scores())
        assert packed_SPC is not None
        return merged_logprobs(packed_SPC, self._settings.num_prompt_logprobs or 0)

    def serve_scores(self, asked: list[np.ndarray]) -> None:
        """Serve, on the other ranks, the scores of emitted tokens, or of the prompts'."""
        if len(asked) == 1:
            self.collectives.gather(self._prompt_scores())
        else:
            self.collectives.gather(self._partial_scores(*upload(self._raw_Nv.device, *asked)))

    def _prompt_scores(self) -> Tensor:
        (ids_P,) = upload(self._prompt_Pv.device, self._prompt_ids_P)
        num_top = self._settings.num_prompt_logprobs or 0
        return partial_prompt_scores(self._prompt_Pv, self._ids, ids_P, num_top)

    def _partial_scores(self, places_M: Tensor, ids_M: Tensor) -> Tensor:
        raw_Mv, scored_Mv = self._raw_Nv[places_M], self._scored_Nv[places_M]
        return partial_scores(raw_Mv, scored_Mv, self._ids, ids_M, self._settings.num_logprobs or 0)

    def next_distributions(self, index_W: np.ndarray) -> Distributions:
        """The distributions, on rank 0, at these of the N positions, while the others run
        :meth:`serve_next_distributions`.

        They are made from the whole logits, so that they equal those of an unsharded model bit by bit.
        """
        logits_Nv = self._logits_Nv
        index_N = torch.full((len(logits_Nv),), NO_NEXT_TOKEN, dtype=torch.int32)
        index_N[: len(index_W)] = torch.from_numpy(index_W)
        self.collectives.from_rank0(index_N)
        (places_W,) = upload(logits_Nv.device, index_W)
        logits_WV = self._gather_rows(logits_Nv[places_W])
        assert logits_WV is not None
        filters = None if self._filters is None else self._filters.select(places_W)
        return distributions_from_logits(logits_WV, self._settings, filters)

    def serve_next_distributions(self) -> None:
        """Send rank 0, from the other ranks, the logits that next tokens are sampled from, if it lacks
        them."""
        logits_Nv = self._logits_Nv
        if not len(logits_Nv) or not self._fetches_distributions:
            return
        index_N = self.collectives.from_rank0(torch.empty(len(logits_Nv), dtype=torch.int32))
        self._gather_rows(logits_Nv[index_N[index_N != NO_NEXT_TOKEN].to(logits_Nv.device)])

    def _gather_rows(self, rows_Wv: Tensor) -> Tensor | None:
        """Whole logits [W, V] on rank 0, in their own precision; None on the others."""
        widest = len(self._slices[0])
        padded_Ww = torch.nn.functional.pad(rows_Wv, (0, widest - len(self._ids)))
        gathered_SWw = self.collectives.gather(padded_Ww)
        if gathered_SWw is None:
            return None
        parts = [rows_Ww[:, : len(ids)] for rows_Ww, ids in zip(gathered_SWw, self._slices, strict=True)]
        return torch.cat(parts, dim=1)

    def _winners(self, logits_Nv: Tensor, verify_input: VerifyInput) -> Tensor:
        if self._settings.is_greedy:
            return likeliest(logits_Nv, self._ids).packed()
        return race_winners(
            self._scores(logits_Nv),
            self._ids,
            torch.from_numpy(verify_input.stream_keys_N),
            torch.from_numpy(verify_input.positions_N),
        ).packed()

    def _scores(self, logits_Nv: Tensor) -> Tensor:
        """The scores after temperature, top-k and, without top-p, min-p."""
        if self._filters is not None:
            return self._filtered(logits_Nv, self._filters)
        scores_Nv = tempered(logits_Nv, self._settings.temperature)
        top_k = self._settings.top_k
        if 0 < top_k < self._vocab_size:
            top_SNK = self.collectives.gather_everywhere(top_scores(scores_Nv, top_k))
            scores_Nv = without_the_rest(scores_Nv, top_SNK)
        self._scored_Nv = scores_Nv
        return scores_Nv

    def _filtered(self, logits_Nv: Tensor, filters: RowFilters) -> Tensor:
        """Scores filtered by each position's own numbers; of a greedy one, only the likeliest token is
        left."""
        scores_Nv = filters.tempered(logits_Nv)
        if filters.most_top_k or filters.has_min_p:
            num_largest = max(1, filters.most_top_k)
            top_SNK = self.collectives.gather_everywhere(top_scores(scores_Nv, num_largest))
            largest_NK = top_SNK.transpose(0, 1).flatten(1).topk(num_largest, dim=1).values
            scores_Nv = filters.within_top_k(scores_Nv, largest_NK)
            scores_Nv = filters.within_min_p(scores_Nv, largest_NK[:, :1])
        self._scored_Nv = scores_Nv
        if not filters.has_greedy:
            return scores_Nv
        winners = merge_winners(self.collectives.gather_everywhere(likeliest(logits_Nv, self._ids).packed()))
        ids_v = torch.arange(self._ids.start, self._ids.stop, device=logits_Nv.device)
        is_left_Nv = (ids_v == winners.token_ids_N[:, None]) | ~filters.is_greedy_N1.bool()
        return scores_Nv.masked_fill(~is_left_Nv, -torch.inf)

    def _verify_by_rejection(self, logits_Nv: Tensor, verify_input: VerifyInput) -> VerifyOutput | None:
        scores_Nv = self._scores(logits_Nv)
        target_logits_indices_C, candidate_ids_C = upload(
            scores_Nv.device, verify_input.target_logits_indices_C, verify_input.candidate_ids_C
        )
        own_C = own_scores(scores_Nv, self._ids, target_logits_indices_C, candidate_ids_C)
        gathered = self.collectives.gather(torch.cat([log_normalisers(scores_Nv), own_C]))
        if gathered is None:
            return None
        normalisers_SN, scores_SC = gathered.split([len(logits_Nv), len(target_logits_indices_C)], dim=1)
        return _RejectionOutput(
            candidate_probabilities(normalisers_SN, scores_SC, target_logits_indices_C), self
        )


@dataclass(frozen=True)
class _RejectionOutput:
    """The candidates' probabilities, on the device; the logits of the next tokens are fetched on demand."""

    probabilities_C: Tensor
    scores: VocabParallelVerifier

    def candidate_probabilities(self) -> np.ndarray:
        return np.asarray(self.probabilities_C.cpu().numpy())

    def next_distributions(self, index_W: np.ndarray) -> Distributions:
        return self.scores.next_distributions(index_W)


class ShardedTarget:
    """The target's rank 0: announces each pass to the other ranks, runs it with them, and verifies alone."""

    def __init__(
        self, runner: ModelRunner, group: dist.ProcessGroup, verifier: VocabParallelVerifier
    ) -> None:
        self._runner = runner
        self._passes = broadcast_link(RANK_ZERO, group)
        self._verifier = verifier
        verifier.tell = self._passes.send
        self.device = runner.device

    def forward(self, updates: PageUpdates, verify_input: VerifyInput) -> VerifyOutput:
        self._passes.send(packed_pass(updates, verify_input, has_rows=self._verifier.is_processing))
        logits_Rv = _run(self._runner, updates, verify_input)
        verify_output = self._verifier.verify(logits_Rv, verify_input)
        assert verify_output is not None
        return verify_output

    def check(self) -> None:
        self._runner.check()

    def close(self) -> None:
        self._passes.send([])


def target_worker_loop(
    runner: ModelRunner, group: dist.ProcessGroup, verifier: VocabParallelVerifier
) -> None:
    """The loop of the target's other ranks: run every pass that rank 0 announces and send it what it needs of
    the logits, until it closes."""
    passes = broadcast_link(RANK_ZERO, group)
    while arrays := passes.receive():
        if len(arrays) <= SCORED_TOKENS:
            verifier.serve_scores(arrays)
            continue
        updates, verify_input = unpacked_pass(arrays)
        verifier.verify(_run(runner, updates, verify_input), verify_input)
        verifier.serve_next_distributions()


def _run(runner: ModelRunner, updates: PageUpdates, verify_input: VerifyInput) -> Tensor:
    """Logits [N + P, v] of this rank's part of the vocabulary, until the next pass."""
    runner.reuses_logits = True
    runner.update_pages(updates)
    return runner.forward(verify_input.batch, verify_input.run_indices)
