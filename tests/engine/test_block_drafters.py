"""Block drafters: what they draft is what the published formulas say, and the tokens stay the target's.

Of the chi-square tests' p-values, sound code gave 0.29 and 0.02; with other seeds 0.65 and 0.69, and the
latter with six 0.53 to 0.79.
"""

import copy
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from specdist.models.drafters.passes import BlockPass
from specdist.models.drafters.runner import DrafterRunner
from specdist.sampling.distributions import SamplingSettings
from tests.engine.block_drafters import (
    DSPARK,
    BlockHarness,
    WatchedGoodput,
    block_drafter,
    expected_confidences,
    expected_probabilities,
    goodput,
)
from tests.engine.eagle import CROWD, check_blocks, check_distribution, eagle_target
from tests.engine.harness import Harness, requests_for
from tests.engine.test_eagle import CROWDED, IDS, TARGET, VOCAB_SIZE, prompts_of_lengths


@pytest.mark.parametrize(
    ("family", "changes", "options", "waits"),
    [
        ("llama", {}, CROWDED | {"num_pages": 16, "max_new_tokens": 20}, True),
        ("gemma2", DSPARK, {}, True),
        ("llama", DSPARK, {}, False),
    ],
    ids=["dflash, preempted", "dspark, gemma2", "dspark, as on a device"],
)
def test_every_block_is_what_the_published_formulas_say(
    family: str,
    changes: dict[str, Any],
    options: dict[str, Any],
    waits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Computed anew for every candidate: states of another layer or position, a block at another position or
    with a causal mask, rows of another place or another vocabulary would give other probabilities."""
    target = TARGET if family == "llama" else eagle_target(VOCAB_SIZE, family)
    draft = block_drafter(target, IDS, **changes)
    monkeypatch.setattr(DrafterRunner, "is_asynchronous", not waits)
    replica = BlockHarness(target, draft, settings=SamplingSettings(), **{"max_new_tokens": 14} | options)
    check_blocks(
        replica,
        requests_for(prompts_of_lengths(1, 17, 2, 20), num_samples=2),
        lambda block: expected_probabilities(target, draft, block),
        is_preempted=bool(options), least=30, every=4,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "changes"),
    [(SamplingSettings(temperature=0.0), {}), (SamplingSettings(is_coupled=True), DSPARK)],
    ids=["dflash, greedy", "dspark, gumbel, cut"],
)
def test_tokens_are_those_of_the_target_alone(
    settings: SamplingSettings, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_for(prompts_of_lengths(3, 17, 1, 31))
    expected = Harness(TARGET, None, settings=settings, max_new_tokens=20).generate(requests)
    draft = block_drafter(TARGET, IDS, **changes)
    replica = BlockHarness(TARGET, draft, settings=settings, max_new_tokens=20)
    if settings.is_coupled:
        replica.policy = goodput(replica.policy.max_draft_tokens, 4, is_coupled=True)
    blocks = Counter[int]()
    compute = BlockPass.compute

    def counted(own: BlockPass, token_ids_T: torch.Tensor, *inputs: Any, **options: Any) -> Any:
        blocks[len(token_ids_T)] += 1
        return compute(own, token_ids_T, *inputs, **options)

    monkeypatch.setattr(BlockPass, "compute", counted)
    found = replica.generate(requests)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    stats = replica.stats_recorder.close_shard(0)
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_draft_passes == blocks.total(), "a block is one pass"
    assert (len({len(block.candidates) for block in replica.blocks[: len(requests)]}) > 1) == bool(changes)


@pytest.mark.parametrize("changes", [{}, DSPARK], ids=["dflash", "dspark"])
def test_lengths_follow_confidences_that_no_draw_has_changed(changes: dict[str, Any]) -> None:
    """Those of the published formulas; and they come back with the tokens of their places."""
    draft = block_drafter(TARGET, IDS, **changes)
    replica = BlockHarness(TARGET, draft, settings=SamplingSettings(temperature=0.7), max_new_tokens=16)
    policy = replica.policy = goodput(replica.policy.max_draft_tokens, 1, kind=WatchedGoodput)
    replica.generate(requests_for(prompts_of_lengths(17)[:1]))
    found = [block for block in replica.blocks if len(block.committed) in policy.asked]
    assert len(found) > 5
    for block in found:
        asked = policy.asked[len(block.committed)]
        expected = expected_confidences(TARGET, draft, block.committed, 0.7)
        np.testing.assert_allclose(asked, expected, rtol=2e-4, atol=1e-6)
    places = {
        (depth, np.float32(each)) for asked in policy.asked.values() for depth, each in enumerate(asked)
    }
    assert policy.verified
    assert {(depth, np.float32(each)) for depth, each in policy.verified} <= places


def test_a_perfect_draft_is_always_accepted() -> None:
    """Of a target that looks at its last token alone, the Markov head can say the whole distribution."""
    target = copy.deepcopy(TARGET)
    whole = {"markov_head_type": "vanilla", "markov_rank": target.config.hidden_size}
    draft = block_drafter(target, range(VOCAB_SIZE), **DSPARK | whole)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        draft.lm_head.weight.zero_()
        draft.markov_head.markov_w1.weight.copy_(target.model.norm(target.model.embed_tokens.weight))
        draft.markov_head.markov_w2.weight.copy_(target.lm_head.weight)
    replica = BlockHarness(target, draft, settings=SamplingSettings(), max_new_tokens=16)
    replica.generate(requests_for(prompts_of_lengths(3, 17), num_samples=4))
    stats = replica.stats_recorder.close_shard(0)
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 50


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        (SamplingSettings(), {}),
        (SamplingSettings(temperature=0.9, top_k=4, top_p=0.9), DSPARK),
    ],
    ids=["dflash, cut", "dspark, filtered"],
)
def test_tokens_follow_the_target_s_distribution(settings: SamplingSettings, changes: dict[str, Any]) -> None:
    """Whole completions of four tokens, against the target's own distribution by enumeration."""
    target = eagle_target(6, initializer_range=0.12)
    draft = block_drafter(target, [0, 2, 3, 5], scale=0.3 if changes else 0.6, **changes)
    replica = BlockHarness(target, draft, settings=settings, **CROWD)
    if not changes:
        replica.policy = goodput(replica.policy.max_draft_tokens, 2400)
    check_distribution(replica, target, settings)
    lengths = Counter(len(block.candidates) for block in replica.blocks)
    assert changes or min(lengths[length] for length in range(3)) > 300, lengths
