"""Drafters of the target's states whose keys and values are in 8 bits draft nearly what exact ones do."""

from functools import partialmethod
from typing import Any

import numpy as np
import pytest

from specdist.models.drafters.runner import DrafterRunner
from specdist.sampling.distributions import SamplingSettings
from tests.engine import block_drafters, eagle, mtp
from tests.engine.harness import requests_for
from tests.engine.test_eagle import prompts_of_lengths

VOCAB_SIZE = 24
IDS = [*range(1, 9), 11, 12, *range(14, 22)]
TARGET = eagle.eagle_target(VOCAB_SIZE)


def eagle3() -> tuple[Any, ...]:
    return TARGET, eagle.eagle_model(TARGET, IDS), eagle.EagleHarness, eagle.expected_probabilities


def head() -> tuple[Any, ...]:
    """Of latent attention."""
    target = mtp.mtp_target("deepseek_v3", VOCAB_SIZE)
    return target, mtp.mtp_head(target), mtp.MtpHarness, mtp.expected_probabilities


def block() -> tuple[Any, ...]:
    draft = block_drafters.block_drafter(TARGET, IDS)
    return TARGET, draft, block_drafters.BlockHarness, block_drafters.expected_probabilities


@pytest.mark.parametrize("kind", [eagle3, head, block])
def test_rounded_keys_and_values_are_read(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits that are taken for numbers, or scales that are forgotten, give other probabilities by far."""
    narrow = partialmethod(DrafterRunner.__init__, has_float8_cache=True)
    monkeypatch.setattr(DrafterRunner, "__init__", narrow)
    target, draft, harness, expected_probabilities = kind()
    replica = harness(target, draft, settings=SamplingSettings(), max_new_tokens=12)
    replica.generate(requests_for(prompts_of_lengths(9, 17, 26)))
    blocks = [each for each in replica.blocks if each.candidates]
    found = np.concatenate([each.probabilities for each in blocks])
    expected = np.concatenate([expected_probabilities(target, draft, each) for each in blocks])
    assert len(found) > 30
    error = np.abs(np.log(found / expected))
    assert 1e-4 < error.mean() < 0.15
