"""Drafters of the target's states in 8 bits, and in half precision, draft nearly what exact ones do."""

from functools import partialmethod
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specdist.models.draft_models.layers import OwnVocabularyModel
from specdist.models.drafters.runner import DrafterRunner
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import requests_for
from tests.engine.test_eagle import prompts_of_lengths
from tests.models.drafters.test_recorded import models_of


@pytest.mark.parametrize("kind", ["eagle3", "deepseek_v3", "dflash"])
def test_rounded_keys_and_values_are_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits that are taken for numbers, or scales that are forgotten, give other probabilities by far."""
    narrow = partialmethod(DrafterRunner.__init__, has_float8_cache=True)
    monkeypatch.setattr(DrafterRunner, "__init__", narrow)
    harness, target, draft, expected_probabilities = models_of(kind)
    replica = harness(target, draft, settings=SamplingSettings(), max_new_tokens=12)
    replica.generate(requests_for(prompts_of_lengths(9, 17, 26)))
    blocks = [each for each in replica.blocks if each.candidates]
    found = np.concatenate([each.probabilities for each in blocks])
    expected = np.concatenate([expected_probabilities(target, draft, each) for each in blocks])
    assert len(found) > 30
    error = np.abs(np.log(found / expected))
    assert 1e-4 < error.mean() < 0.15


def test_tokens_that_a_draft_lacks_have_no_probability_in_half_precision() -> None:
    """float16 has no -1e30, and infinite logits have no entropy."""
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=9), known_ids=torch.tensor([2, 5, 7]))
    own_Nv = torch.tensor([[1.0, 2.0, -3.0]]).half()
    whole_NV = OwnVocabularyModel.whole_logits(model, own_Nv)  # type: ignore[arg-type]
    assert whole_NV.dtype == own_Nv.dtype and whole_NV.isfinite().all()
    assert whole_NV.float().softmax(1).nonzero()[:, 1].tolist() == [2, 5, 7]
