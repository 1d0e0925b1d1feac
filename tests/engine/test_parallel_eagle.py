"""P-EAGLE drafts: what they draft is what the published formulas say, and the tokens stay the target's.

The chi-square test's p-value of sound code was 0.69, and 0.59 to 0.86 with three other seeds.
"""

import copy

import pytest
import torch

from specdist.models.drafters.runner import DrafterRunner
from specdist.sampling.distributions import SamplingSettings
from tests.engine.block_drafters import goodput
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
from tests.engine.harness import Harness, requests_for
from tests.engine.test_eagle import IDS, TARGET, VOCAB_SIZE, prompts_of_lengths


def test_every_block_is_what_the_published_formulas_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed anew for every block, from the whole text before it; with preemptions, and as on a device."""
    draft = eagle_model(TARGET, IDS, **PEAGLE, norm_before_fc=True)
    monkeypatch.setattr(DrafterRunner, "is_asynchronous", True)
    options = {"num_pages": 12, "max_num_seqs": 4, "max_num_batched_tokens": 24, "max_new_tokens": 16}
    replica = EagleHarness(TARGET, draft, settings=SamplingSettings(), **options)
    check_blocks(
        replica,
        requests_for(prompts_of_lengths(1, 17, 2, 20), num_samples=2),
        lambda block: expected_probabilities(TARGET, draft, block),
        is_preempted=True, least=60, every=6,
    )  # fmt: skip


@pytest.mark.parametrize("settings", [SamplingSettings(temperature=0.0), SamplingSettings(is_coupled=True)])
def test_tokens_are_those_of_the_target_alone(settings: SamplingSettings) -> None:
    requests = requests_for(prompts_of_lengths(3, 17, 1, 31))
    expected = Harness(TARGET, None, settings=settings, max_new_tokens=12).generate(requests)
    draft = eagle_model(TARGET, IDS, **PEAGLE)
    replica = EagleHarness(TARGET, draft, settings=settings, max_new_tokens=12)
    if settings.is_coupled:
        replica.policy = goodput(replica.policy.max_draft_tokens, 4, is_coupled=True)
    found = replica.generate(requests)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    stats = replica.stats_recorder.close_shard(0)
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_a_perfect_draft_is_always_accepted() -> None:
    """Of a target whose distribution is the same after every token, which reads nothing."""
    target, draft = copy.deepcopy(TARGET), eagle_model(TARGET, range(VOCAB_SIZE), **PEAGLE)
    with torch.no_grad():
        target.model.norm.weight.zero_()
        draft.norm.weight.zero_()
    replica = EagleHarness(target, draft, settings=SamplingSettings(), max_new_tokens=16)
    replica.generate(requests_for(prompts_of_lengths(3, 17), num_samples=4))
    stats = replica.stats_recorder.close_shard(0)
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 50


def test_tokens_follow_the_target_s_distribution() -> None:
    """Whole completions of four tokens, against the target's own distribution by enumeration."""
    target, settings = eagle_target(6, initializer_range=0.12), SamplingSettings()
    draft = eagle_model(target, [0, 2, 3, 5], scale=0.3, **PEAGLE)
    check_distribution(EagleHarness(target, draft, settings=settings, **CROWD), target, settings)
