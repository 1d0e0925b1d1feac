"""Under gumbel coupling the output is the target's own sample: the draft changes only the speed."""

import pytest
import torch

from specdist.sampling.coupling import coupled_draws
from specdist.sampling.distributions import Dense
from specdist.sampling.keys import stream_key
from tests.engine.sampled import ALARM
from tests.statistics import chi_square_p_value


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
