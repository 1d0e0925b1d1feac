"""The probabilities of traced tokens recomputed by one plain forward pass per block."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from specdist.data.stats.traces import TracedToken
from specdist.sampling.coupling import next_token_distributions
from specdist.sampling.distributions import Distributions, SamplingSettings
from specdist.sampling.keys import stream_key


def check_acceptance(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokens: Sequence[TracedToken],
    *,
    prompt_ids: list[int],
    completion_ids: list[int],
    settings: SamplingSettings,
    row_key: tuple[int, int, int],
) -> None:
    """Every traced acceptance probability of a row is min(1, P/Q), after the tokens drafted before it.

    ``row_key``: seed, row and sample.
    """
    for _, group in groupby(tokens, key=lambda token: token.round):
        block = list(group)
        begin = block[0].position
        ids = torch.tensor([prompt_ids + completion_ids[:begin] + [token.token_id for token in block]])
        positions = torch.arange(ids.shape[1] - len(block), ids.shape[1])
        asked = ids[0, positions]
        keys = torch.full_like(positions, stream_key(*row_key))

        def distributions(
            model: PreTrainedModel,
            ids: torch.Tensor = ids,
            keys: torch.Tensor = keys,
            positions: torch.Tensor = positions,
        ) -> Distributions:
            with torch.inference_mode():
                logits = model(ids).logits[0, positions - 1]
            return next_token_distributions(logits, settings, keys, positions)

        target_probabilities = distributions(target).probabilities_of(asked).numpy()
        draft_probabilities = distributions(draft).probabilities_of(asked).numpy()
        assert (draft_probabilities > 0).all(), "the draft cannot have drawn it"
        expected = np.minimum(1.0, target_probabilities / draft_probabilities)
        for token, probability in zip(block, expected, strict=True):
            if token.acceptance_probability is not None:
                # float32 through other batches, or slices
                assert token.acceptance_probability == pytest.approx(probability, rel=1e-3, abs=1e-5)
        if settings.is_random:
            found = [token.draft_probability for token in block]
            assert found == pytest.approx(draft_probabilities.tolist(), rel=1e-3)
