"""EAGLE-3 and P-EAGLE drafts: what they draft is what the published formulas say, and the tokens stay the
target's.

Of the chi-square tests' p-values, sound code gave 0.51 and 0.69.
"""

from typing import Any

import numpy as np
import pytest

from specdist.models.drafters.runner import DrafterRunner
from specdist.sampling.distributions import SamplingSettings
from tests.engine.eagle import (
    CROWD,
    PEAGLE,
    EagleHarness,
    check_blocks,
    check_distribution,
    eagle_model,
    eagle_target,
    expected_probabilities,
)
from tests.engine.harness import requests_for

VOCAB_SIZE = 24
# Neither the first ones, nor evenly spaced.
IDS = [*range(1, 9), 11, 12, *range(14, 22)]
TARGET = eagle_target(VOCAB_SIZE)


def prompts_of_lengths(*lengths: int) -> list[list[int]]:
    generator = np.random.default_rng(7)
    prompts = [generator.integers(2, VOCAB_SIZE, size=length).tolist() for length in lengths]
    # Two that share pages.
    return [*prompts, prompts[-1][:9] + prompts[0]]


# Contexts in chunks, and preemptions.
CROWDED = {"max_num_batched_tokens": 20, "num_pages": 14, "max_num_seqs": 4}


@pytest.mark.parametrize(
    ("family", "changes", "options", "waits"),
    [
        ("llama", {}, {}, True),
        ("gemma2", {"fc_norm": True, "norm_output": True}, CROWDED, True),
        ("gpt_neox", {}, {}, False),
        (
            "llama",
            PEAGLE | {"norm_before_fc": True},
            CROWDED | {"num_pages": 12, "max_new_tokens": 16},
            False,
        ),
    ],
    ids=[
        "llama",
        "gemma2, two layers of Qwen3, preempted",
        "gpt_neox, as on a device",
        "peagle, preempted, as on a device",
    ],
)
def test_every_block_is_what_the_published_formulas_say(
    family: str,
    changes: dict[str, Any],
    options: dict[str, Any],
    waits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Computed anew for every candidate, from the whole text before it: other states, states of another
    position, those of a draft that was rejected, or another vocabulary would give other probabilities."""
    target = TARGET if family == "llama" else eagle_target(VOCAB_SIZE, family)
    draft = eagle_model(target, IDS, **changes)
    monkeypatch.setattr(DrafterRunner, "is_asynchronous", not waits)
    replica = EagleHarness(target, draft, settings=SamplingSettings(), **{"max_new_tokens": 14} | options)
    check_blocks(
        replica,
        requests_for(prompts_of_lengths(1, 17, 2, 26), num_samples=2),
        lambda block: expected_probabilities(target, draft, block),
        is_preempted=bool(options), least=30, every=4,
    )  # fmt: skip


@pytest.mark.parametrize("changes", [{}, PEAGLE], ids=["eagle3, coupled", "peagle"])
def test_tokens_follow_the_target_s_distribution(changes: dict[str, Any]) -> None:
    """Whole completions of four tokens, against the target's own distribution by enumeration."""
    target = eagle_target(6, initializer_range=0.12)
    draft = eagle_model(target, [0, 2, 3, 5], scale=0.3, **changes)
    settings = SamplingSettings(is_coupled=not changes)
    check_distribution(EagleHarness(target, draft, settings=settings, **CROWD), target, settings)
