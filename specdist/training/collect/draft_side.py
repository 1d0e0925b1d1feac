"""The draft's part of a collection: tokens drawn after prefixes, and their hidden states.

R texts of a group, N places of all these texts in order, M places whose tokens become examples, T flat
tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from specdist.engine.assembly import PAGE_SIZE
from specdist.engine.request import Request
from specdist.engine.schedule.detokenizer import NO_TEXT
from specdist.engine.schedule.stopping import StopRules
from specdist.job.models.model_plan import ModelPlan
from specdist.job.replica.replica import Replica
from specdist.models.batch.flat import FlatBatch
from specdist.models.heads.examples import ExampleBlock
from specdist.models.passes.runner import ModelRunner
from specdist.sampling.branch_estimates import DraftDraws
from specdist.sampling.random import Purpose, uniforms
from specdist.training.collect.config import CollectConfig
from specdist.training.collect.texts import AskedTokens, Text, contexts_of, groups_of, in_passes, pages_of
from specdist.utils.errors import UserError


class DraftSide:
    """The tasks of the rank that holds the draft. Without ``token_mixing`` the hidden states are those that
    the tokens were drawn from."""

    def __init__(self, config: CollectConfig, models: ModelPlan, replica: Replica) -> None:
        self._replica = replica
        self._runner: ModelRunner = replica.draft_runner
        self._draws = DraftDraws(
            settings=replica.settings, vocab_size=models.vocab_size, keeps_scores=False, keeps_features=True
        )
        self._stop_token_ids = models.target.stop_token_ids()
        self._token_mixing, self._hidden_dtype = config.token_mixing, config.hidden_dtype

    def complete(self, requests: list[Request]) -> dict[int, list[int]]:
        """Completions by the draft alone, by row."""
        # The completions' text is not needed.
        stop_rules = StopRules(NO_TEXT, self._stop_token_ids)
        engine = self._replica.draft_engine(iter(requests), stop_rules)
        return {completion.request.row_id: completion.token_ids for completion in engine.run()}

    def score(self, texts: Sequence[Text]) -> list[ExampleBlock]:
        """Draw a token after every place, and run it."""
        groups = groups_of(
            texts, num_slots=self._replica.num_slots, num_pages=self._replica.num_pages, page_size=PAGE_SIZE
        )
        return [block for group in groups for block in self._score_group(group)]

    def _score_group(self, group: Sequence[Text]) -> list[ExampleBlock]:
        self._runner.update_pages(pages_of(group, PAGE_SIZE))
        places = _Places.of(group)
        drawn_N, described_4N, drawing_NH = self._draw(contexts_of(group), places)
        if self._token_mixing is None:
            kept_M, hidden_MH = np.arange(len(drawn_N)), drawing_NH
        else:
            zeros_N = torch.zeros_like(places.keys_N)
            coins_N = uniforms(places.keys_N, places.positions_N, zeros_N, Purpose.ACCEPT).numpy()
            kept_M = np.flatnonzero(coins_N >= self._token_mixing)
            hidden_MH = self._run_mixed(places, drawn_N, kept_M)
        ends_M = np.searchsorted(kept_M, np.cumsum(places.counts_R)).tolist()
        return [
            ExampleBlock(
                row_id=text.row_id,
                prefix_kind=text.kind,
                positions_M=places.positions_N.numpy()[kept_M[begin:end]],
                token_ids_M=drawn_N[kept_M[begin:end]],
                probabilities_M=described_4N[0, kept_M[begin:end]],
                features_3M=described_4N[1:, kept_M[begin:end]],
                hidden_MH=hidden_MH[begin:end],
            )
            for text, (begin, end) in zip(group, pairwise([0, *ends_M]), strict=True)
        ]

    def _draw(self, contexts: AskedTokens, places: _Places) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids [N], their probabilities and features [4, N], and the states [N, H] that they were drawn
        from."""
        drawn, described, states = [np.zeros(0, np.int64)], [np.zeros((4, 0))], [self._hidden_of_none()]
        begin = 0
        for part in in_passes(contexts):
            if self._token_mixing is None:
                logits_NV, hidden_NH = self._runner.forward_with_hidden(part.batch, part.index_N)
                states.append(self._stored(hidden_NH))
            else:
                logits_NV = self._runner.forward(part.batch, part.index_N)
            end = begin + len(part.index_N)
            if end > begin:
                ids_N, described_4N = self._draw_from(
                    logits_NV, places.keys_N[begin:end], places.positions_N[begin:end]
                )
                drawn.append(ids_N)
                described.append(described_4N)
            begin = end
        return np.concatenate(drawn), np.concatenate(described, axis=1), np.concatenate(states)

    def _draw_from(
        self, logits_NV: Tensor, keys_N: Tensor, positions_N: Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        uniforms_N = None
        if self._draws.settings.is_random:
            uniforms_N = uniforms(keys_N, positions_N, torch.zeros_like(keys_N), Purpose.DRAFT)
            uniforms_N = uniforms_N.to(logits_NV.device)
        drawn = self._draws.draw(logits_NV, keys_N, positions_N, uniforms_N)
        assert drawn.features_3N is not None
        described_4N = torch.cat([drawn.probabilities_N[None], drawn.features_3N])
        return drawn.token_ids_N.cpu().numpy(), described_4N.cpu().numpy()

    def _run_mixed(self, places: _Places, drawn_N: np.ndarray, kept_M: np.ndarray) -> np.ndarray:
        """[M, H] in the sequences Z, which have the texts' own tokens elsewhere (SpecDec++, section 4.4)."""
        mixed_ids_N = places.own_ids_N.copy()
        mixed_ids_N[kept_M] = drawn_N[kept_M]
        batch = FlatBatch(mixed_ids_N, places.slots_N, places.positions_N.numpy())
        hidden = [self._hidden_of_none()]
        for part in in_passes(AskedTokens(batch, kept_M)):
            _, hidden_NH = self._runner.forward_with_hidden(part.batch, part.index_N)
            hidden.append(self._stored(hidden_NH))
        return np.concatenate(hidden)

    def _stored(self, hidden_NH: Tensor) -> np.ndarray:
        stored_NH = hidden_NH.to(getattr(torch, self._hidden_dtype))
        if not bool(stored_NH.isfinite().all()):
            raise UserError(
                f"--hidden_dtype {self._hidden_dtype} cannot represent the draft's hidden states, whose "
                f"largest value is {float(hidden_NH.abs().max()):.3g}: use --hidden_dtype float32"
            )
        return stored_NH.cpu().numpy()

    def _hidden_of_none(self) -> np.ndarray:
        hidden_size = self._runner.model.config.get_text_config().hidden_size
        return np.zeros((0, hidden_size), self._hidden_dtype)


@dataclass(frozen=True, kw_only=True)
class _Places:
    """The places of a group in order: slot, position, random stream, and the text's own token there (any
    token after a text's end, where it is not needed)."""

    slots_N: np.ndarray
    positions_N: Tensor
    keys_N: Tensor
    own_ids_N: np.ndarray
    counts_R: np.ndarray

    @staticmethod
    def of(group: Sequence[Text]) -> _Places:
        counts_R = np.array([len(text.places_N) for text in group], np.int64)
        own_ids = [np.array([*text.token_ids, 0])[text.places_N] for text in group]
        return _Places(
            slots_N=np.repeat(np.arange(len(group)), counts_R),
            positions_N=torch.from_numpy(np.concatenate([text.places_N for text in group])),
            keys_N=torch.from_numpy(np.repeat([text.stream_key for text in group], counts_R)),
            own_ids_N=np.concatenate(own_ids),
            counts_R=counts_R,
        )
