"""Under gumbel coupling the output is the target's own sample: the draft changes only the speed."""

import pytest
import torch

from specdist.sampling.coupling import coupled_draws
from specdist.sampling.distributions import Dense, SamplingSettings
from specdist.sampling.keys import stream_key
from tests.engine.harness import Harness, requests_for
from tests.engine.sampled import ALARM
from tests.engine.test_greedy import prompts_of_lengths
from tests.models.families import noisy_copy, tiny_model
from tests.statistics import chi_square_p_value

COUPLED = SamplingSettings(temperature=0.9, top_k=40, top_p=0.95, is_coupled=True)


def test_coupled_tokens_are_those_of_the_target_whatever_drafts() -> None:
    target = tiny_model("llama", seed=3)
    drafts = {"weak": tiny_model("llama", seed=4), "strong": noisy_copy(target, scale=0.02), "itself": target}
    requests = requests_for(prompts_of_lengths(5, 23, 40, 2, 11, 17), num_samples=2)
    common = {"settings": COUPLED, "eos": [7], "max_new_tokens": 24}
    expected = [c.token_ids for c in Harness(target, None, **common).generate(requests)]
    rates = {}
    for name, draft in drafts.items():
        for num_draft_tokens in range(1, 9):
            replica = Harness(
                target,
                draft,
                num_draft_tokens=num_draft_tokens,
                num_ahead_tokens=num_draft_tokens + 1 if num_draft_tokens % 2 else 0,
                num_branches=num_draft_tokens // 3 if num_draft_tokens % 2 else 0,
                max_num_seqs=1 + num_draft_tokens,
                **common,
            )
            assert [c.token_ids for c in replica.generate(requests)] == expected, (name, num_draft_tokens)
            stats = replica.stats_recorder.close_shard(0)
            rates[name] = stats.num_accepted_tokens / stats.num_draft_tokens
    assert rates["weak"] < rates["strong"] < rates["itself"] == 1


def two_distributions(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = 1.5 * torch.randn(2, 12, generator=torch.Generator().manual_seed(0))
    target, draft = logits.softmax(1)
    return target.expand(num, -1), draft.expand(num, -1)


def test_coupled_draws_follow_their_distribution_along_positions_and_rows() -> None:
    num = 30_000
    target, _ = two_distributions(num)
    streams = torch.tensor([stream_key(0, row, 0) for row in range(num)])
    for keys, positions in (
        (streams[:1].expand(num), torch.arange(num)),
        (streams, torch.full((num,), 5)),
    ):
        drawn = coupled_draws(Dense(target), keys, positions).token_ids_N
        assert chi_square_p_value(torch.bincount(drawn, minlength=12), target[0]) > ALARM


@pytest.mark.parametrize("seed", [1, 2])
def test_two_distributions_draw_the_same_token_as_often_as_the_theory_says(seed: int) -> None:
    """At least (1 - TV) / (1 + TV), and never more often than rejection accepts (Daliri et al. 2024)."""
    num = 20_000
    target, draft = two_distributions(num)
    keys = torch.tensor([stream_key(seed, 0, 0)]).expand(num)
    first, second = (
        coupled_draws(Dense(distribution), keys, torch.arange(num)).token_ids_N
        for distribution in (target, draft)
    )
    distance = float((target[0] - draft[0]).abs().sum()) / 2
    rate = float((first == second).double().mean())
    four_sigma = 4 * (0.25 / num) ** 0.5
    assert (1 - distance) / (1 + distance) - four_sigma < rate < 1 - distance + four_sigma
