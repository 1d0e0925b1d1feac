"""Collecting the exhaustive trace: a target pass over a completion, and drafts after all its positions.

Each position is a branch of the completion's sequence in the draft's cache. The branches share its pages and
are drafted side by side, a token of each per pass: a completion of N tokens takes ``cap`` draft passes of up
to N tokens, and one target pass. As in a run, trained heads read the hidden state of each draft token when a
pass runs it.

N tokens of the completion, A positions that are still drafted after, D depths, V vocabulary, E heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdist.engine.assembly import Assembly
from specdist.lab.replay import PromptTrace
from specdist.models.cache.pages import PageUpdates
from specdist.models.passes.flat import FlatBatch
from specdist.models.passes.hidden import HiddenStateHead
from specdist.models.passes.runner import ModelRunner
from specdist.sampling.branch_estimates import draft_distributions, draft_features
from specdist.sampling.distributions import Dense, distributions_from_logits
from specdist.sampling.keys import stream_key
from specdist.sampling.random import Purpose, uniforms
from specdist.sampling.rejection_sampler import accepted, recovered_distributions

# The completion itself was drawn with the numbers of sample 0.
COMPLETION_SAMPLE, TRACE_SAMPLE = 0, 1
SLOT = 0


@dataclass(frozen=True, kw_only=True)
class TracedCompletion:
    """A completion of the target to be traced, and its limit."""

    row_id: int
    prompt_ids: list[int]
    completion_ids: list[int]
    max_new_tokens: int


class TraceCollector:
    """Traces one completion after another, with both runners' caches for itself."""

    def __init__(
        self,
        target: ModelRunner,
        draft: ModelRunner,
        assembly: Assembly,
        heads: Sequence[HiddenStateHead] = (),
    ) -> None:
        """``assembly``: of the run that drew the completions; its longest block is the cap. ``heads``: they
        read the draft's last hidden states."""
        limits = assembly.scheduling
        self._target = target
        self._draft = draft
        self._heads = [head.to(device=draft.device, dtype=draft.dtype).eval() for head in heads]
        self._settings = assembly.settings
        self._vocab_size = assembly.vocab_size
        self._is_stop_V = np.zeros(assembly.vocab_size, bool)
        stop_ids = [token_id for token_id in assembly.stop_rules.token_ids if token_id < assembly.vocab_size]
        self._is_stop_V[stop_ids] = True
        self._num_depths = limits.max_draft_tokens
        self._seed = limits.seed
        pages = np.arange(-(-limits.max_seq_len // assembly.page_size), dtype=np.int32)
        alone = dataclasses.replace(
            assembly,
            num_pages=len(pages),
            windowed=None,
            scheduling=dataclasses.replace(limits, max_num_seqs=1),
        )
        updates = PageUpdates(np.full(len(pages), SLOT, np.int32), pages, pages)
        alone.allocate(target)
        alone.allocate_draft(draft, limits.max_new_tokens, limits.max_draft_tokens)
        for runner in (target, draft):
            runner.update_pages(updates)

    def collect(self, completion: TracedCompletion) -> PromptTrace:
        """Draft after every position of the completion, up to the cap, a stop token, or its limit."""
        num_prompt, num_tokens = len(completion.prompt_ids), len(completion.completion_ids)
        context_ids = np.array(completion.prompt_ids + completion.completion_ids[:-1], np.int64)
        context = FlatBatch(
            context_ids, np.full(len(context_ids), SLOT, np.int64), np.arange(len(context_ids))
        )
        asked_N = (
            num_prompt - 1 + np.arange(num_tokens) if self._settings.is_random else np.zeros(0, np.int64)
        )
        target_NV = self._target_distributions(context, asked_N)
        self._draft.forward(context, [])
        lines_N = np.arange(num_tokens)
        # A branch begins with the token before its position, which is run once more.
        self._draft.open_branches(np.full(num_tokens, SLOT), 1 + lines_N, num_prompt - 1 + lines_N)
        table = _Table.empty(num_tokens, self._num_depths, len(self._heads))
        on_path_N = np.ones(num_tokens, bool)
        active_A = lines_N
        last_ids_A = context_ids[num_prompt - 1 :]
        for depth in range(self._num_depths):
            # The last token of a completion's limit is always the target's.
            keep_A = active_A + depth < completion.max_new_tokens - 1
            if depth:
                keep_A &= ~self._is_stop_V[last_ids_A]
            active_A, last_ids_A = active_A[keep_A], last_ids_A[keep_A]
            if not len(active_A):
                break
            positions_A = num_prompt + active_A + depth
            batch = FlatBatch(last_ids_A, 1 + active_A, positions_A - 1)
            logits_AV, hidden_AH = self._draft_pass(batch)
            if hidden_AH is not None and depth:
                self._estimate(table, hidden_AH, active_A, depth - 1, of_drawing_state=False)
            # The target verifies nothing after the completion's end, or off its path.
            on_path_N &= lines_N + depth < num_tokens
            last_ids_A = self._draw(completion, logits_AV, target_NV, active_A, depth, on_path_N, table)
            if hidden_AH is not None:
                self._estimate(table, hidden_AH, active_A, depth, of_drawing_state=True)
        return PromptTrace(
            prompt_ids=np.array(completion.prompt_ids, np.int64),
            completion_ids=np.array(completion.completion_ids, np.int64),
            max_new_tokens=completion.max_new_tokens,
            is_stop_ND=self._is_stop_V[table.token_ids_ND]
            & (np.arange(self._num_depths) < table.num_drafted_N[:, None]),
            **vars(table),
        )

    def _draft_pass(self, batch: FlatBatch) -> tuple[Tensor, Tensor | None]:
        """Logits [A, V] after the last tokens and, if there are heads, the hidden states [A, H] of these."""
        index = np.arange(len(batch))
        if not self._heads:
            return self._draft.forward(batch, index)[:, : self._vocab_size], None
        logits_AV, hidden_AH = self._draft.forward_with_hidden(batch, index)
        return logits_AV[:, : self._vocab_size], hidden_AH

    @torch.inference_mode()
    def _estimate(
        self, table: _Table, hidden_AH: Tensor, active_A: np.ndarray, depth: int, *, of_drawing_state: bool
    ) -> None:
        """Note the estimates of the heads that read these states, from features in single precision as in a
        run."""
        features_3A = table.features_of(active_A, depth)
        given_3A = torch.from_numpy(features_3A.astype(np.float32)).to(hidden_AH.device)
        for index, head in enumerate(self._heads):
            if head.reads_drawing_state == of_drawing_state:
                estimates_A = head(hidden_AH, given_3A).double().sigmoid()
                table.estimates_END[index, active_A, depth] = estimates_A.cpu().numpy()

    def _target_distributions(self, context: FlatBatch, asked_N: np.ndarray) -> Tensor | None:
        """[N, V] probabilities along the completion; None for greedy and coupled draws, which need none."""
        if not len(asked_N):
            return None
        distributions = distributions_from_logits(
            self._target.forward(context, asked_N)[:, : self._vocab_size], self._settings
        )
        assert isinstance(distributions, Dense)
        return distributions.probabilities_NV

    def _draw(
        self,
        completion: TracedCompletion,
        logits_AV: Tensor,
        target_NV: Tensor | None,
        active_A: np.ndarray,
        depth: int,
        on_path_N: np.ndarray,
        table: _Table,
    ) -> np.ndarray:
        """Draw one token per active line, note what is known of it, and which lines it leaves on the path."""
        own_key = stream_key(self._seed, completion.row_id, COMPLETION_SAMPLE)
        positions_A = torch.from_numpy(len(completion.prompt_ids) + active_A + depth)
        distributions_A, _, undecided_A = draft_distributions(
            logits_AV, self._settings, torch.full_like(positions_A, own_key), positions_A
        )
        ids_N = np.array(completion.completion_ids, np.int64)
        on_path_A = on_path_N[active_A]
        own_ids_A = ids_N[np.minimum(active_A + depth, len(ids_N) - 1)]
        if target_NV is None:
            drawn_A = distributions_A.draw(None)
            is_accepted_A = on_path_A & (drawn_A.cpu().numpy() == own_ids_A)
            acceptance_A = is_accepted_A.astype(float)
        else:
            assert isinstance(distributions_A, Dense)
            places_A = torch.from_numpy(np.minimum(active_A + depth, len(ids_N) - 1))
            target_AV = target_NV[places_A.to(target_NV.device)]
            key = stream_key(self._seed, completion.row_id, TRACE_SAMPLE)
            attempts_A = torch.from_numpy(active_A)
            keys_A = torch.full_like(attempts_A, key)
            drawn_A, is_accepted_A, acceptance_A = coupled_with(
                distributions_A,
                Dense(target_AV),
                torch.from_numpy(own_ids_A),
                torch.from_numpy(on_path_A),
                uniforms(keys_A, positions_A, attempts_A, Purpose.ACCEPT),
                uniforms(keys_A, positions_A, attempts_A, Purpose.DRAFT),
            )
        drawn_ids_A = drawn_A.cpu().numpy()
        features_3A = draft_features(logits_AV, undecided_A, drawn_A, self._settings).cpu().numpy()
        places = active_A, np.full(len(active_A), depth)
        table.num_drafted_N[active_A] += 1
        table.num_accepted_N[active_A] += is_accepted_A
        table.token_ids_ND[places] = drawn_ids_A
        table.entropies_ND[places], table.probabilities_ND[places], table.top_probabilities_ND[places] = (
            features_3A
        )
        table.acceptance_ND[places] = np.where(on_path_A, acceptance_A, np.nan)
        on_path_N[active_A] = is_accepted_A
        return drawn_ids_A


def coupled_with(
    draft_A: Dense, target_A: Dense, own_ids_A: Tensor, on_path_A: Tensor, keeps_A: Tensor, draws_A: Tensor
) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Draft tokens as a run would have drawn them, given its completion.

    On the path: the completion's token x with probability min(1, Q(x)/P(x)), which the target accepts; else
    one from norm(max(0, Q - P)), which it rejects. Off the path: from Q.

    Args:
        keeps_A, draws_A: uniform numbers for the two steps.

    Returns:
        The tokens, on the distributions' device; whether each is on the path and accepted; and the target's
        acceptance probability.
    """
    device = draft_A.device
    own_A = own_ids_A.to(device)
    keeps = accepted(draft_A.probabilities_of(own_A).cpu(), target_A.probabilities_of(own_A).cpu(), keeps_A)
    is_accepted_A = keeps & on_path_A
    verified_AV = torch.where(on_path_A[:, None].to(device), target_A.probabilities_NV, 0.0)
    others_A = recovered_distributions(draft_A, Dense(verified_AV)).draw(draws_A.to(device))
    drawn_A = torch.where(is_accepted_A.to(device), own_A, others_A)
    ratio_A = target_A.probabilities_of(drawn_A) / draft_A.probabilities_of(drawn_A)
    return drawn_A, is_accepted_A.numpy(), ratio_A.clamp(max=1.0).cpu().numpy()


@dataclass(frozen=True)
class _Table:
    """The arrays of a :class:`PromptTrace`, to be filled."""

    num_accepted_N: np.ndarray
    num_drafted_N: np.ndarray
    token_ids_ND: np.ndarray
    entropies_ND: np.ndarray
    probabilities_ND: np.ndarray
    top_probabilities_ND: np.ndarray
    acceptance_ND: np.ndarray
    estimates_END: np.ndarray

    def features_of(self, lines_A: np.ndarray, depth: int) -> np.ndarray:
        """[3, A] of the tokens drafted there."""
        columns = self.entropies_ND, self.probabilities_ND, self.top_probabilities_ND
        return np.stack([column[lines_A, depth] for column in columns])

    @staticmethod
    def empty(num_tokens: int, num_depths: int, num_heads: int) -> _Table:
        shape = num_tokens, num_depths
        return _Table(
            np.zeros(num_tokens, np.int64),
            np.zeros(num_tokens, np.int64),
            np.zeros(shape, np.int64),
            np.zeros(shape),
            np.zeros(shape),
            np.zeros(shape),
            np.full(shape, np.nan),
            np.full((num_heads, *shape), np.nan),
        )
