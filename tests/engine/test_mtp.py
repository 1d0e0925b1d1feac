"""A target's own MTP heads: what they draft is what the papers say, and the tokens stay the target's.

The chi-square test's p-value was 0.85 with sound code.
"""

import pytest
import torch

from specdist.sampling.distributions import SamplingSettings
from tests.engine.eagle import CROWD, check_blocks, check_distribution
from tests.engine.harness import Harness, requests_for
from tests.engine.mtp import FAMILIES, MtpHarness, expected_probabilities, mtp_head, mtp_target
from tests.engine.test_eagle import CROWDED, VOCAB_SIZE, prompts_of_lengths


@pytest.mark.parametrize("family", FAMILIES)
def test_every_block_is_what_the_papers_say(family: str) -> None:
    """Computed anew for every candidate, from the whole text before it: states of another position or from
    before the norm, those of a draft that was rejected, or a norm left out would give other probabilities."""
    target = mtp_target(family, VOCAB_SIZE)
    head = mtp_head(target)
    options = CROWDED if family == "glm4_moe" else {}
    replica = MtpHarness(
        target, head, settings=SamplingSettings(), max_new_tokens=14 if options else 9, **options
    )
    check_blocks(
        replica,
        requests_for(prompts_of_lengths(1, 17, 2, 26), num_samples=2 if options else 1),
        lambda block: expected_probabilities(target, head, block),
        is_preempted=bool(options), least=12, every=3, rtol=5e-4,
    )  # fmt: skip


@pytest.mark.parametrize("settings", [SamplingSettings(temperature=0.0), SamplingSettings(is_coupled=True)])
def test_greedy_and_coupled_tokens_are_those_of_the_target_alone(settings: SamplingSettings) -> None:
    """On a target with recurrent layers, whose head has none."""
    target = mtp_target("qwen3_5_text", VOCAB_SIZE)
    requests = requests_for(prompts_of_lengths(3, 17, 1, 31))
    expected = Harness(target, None, max_new_tokens=10, settings=settings).generate(requests)
    replica = MtpHarness(target, mtp_head(target), max_new_tokens=10, settings=settings)
    found = replica.generate(requests)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    stats = replica.stats_recorder.close_shard(0)
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_tokens_follow_the_target_s_distribution() -> None:
    """Whole completions of four tokens, against the target's own distribution by enumeration."""
    target = mtp_target("deepseek_v3", 6, num_hidden_layers=2)
    # Flatter than its random weights make it, so that every completion has a chance.
    with torch.no_grad():
        target.lm_head.weight.mul_(0.4)
    settings = SamplingSettings()
    replica = MtpHarness(target, mtp_head(target), settings=settings, **CROWD)
    check_distribution(replica, target, settings)


def test_a_perfect_head_is_always_right() -> None:
    """A target of one layer that sees no other token; its head has the same layer, and hands it the embedding
    of a token alone. So what the head says of a token's successor is what the target will say."""
    target = mtp_target("glm4_moe", VOCAB_SIZE, num_hidden_layers=1, first_k_dense_replace=0)
    head = mtp_head(target)
    with torch.no_grad():
        embedding = target.model.embed_tokens.weight
        # Of the size that the head's norm gives them.
        embedding.div_(embedding.square().mean(dim=1, keepdim=True).sqrt())
        target.model.layers[0].self_attn.o_proj.weight.zero_()
        own = {name: weight for name, weight in target.state_dict().items() if "eh_proj" not in name}
        head.load_state_dict(own, strict=False)
        head.mtp.enorm.weight.fill_(1.0)
        size = target.config.hidden_size
        head.mtp.eh_proj.weight.copy_(torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1))
    replica = MtpHarness(target, head, settings=SamplingSettings(), max_new_tokens=24)
    replica.generate(requests_for(prompts_of_lengths(2, 17)))
    stats = replica.stats_recorder.close_shard(0)
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 30
