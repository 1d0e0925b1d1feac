"""Drafters of the target's states whose keys and values are in 8 bits draft nearly what exact ones do."""

from functools import partialmethod

import numpy as np
import pytest

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
