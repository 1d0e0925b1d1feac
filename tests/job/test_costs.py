"""How far to draft ahead, and how many branches: what the measured times say."""

import numpy as np
import pytest

from specdist.job.costs import BRANCH_COUNTS, Costs, caught_share, ready_share, tokens_per_pass

MAX_DRAFT_TOKENS = 5


def plan(target_pass: int, draft_step: list[int], num_branches: int | None = None) -> tuple[int, int]:
    costs = Costs(target_pass_ns=target_pass, draft_step_ns=draft_step)
    found = costs.plan_ahead(MAX_DRAFT_TOKENS, num_branches)
    return found.num_tokens, found.num_branches


def test_a_draft_that_costs_nothing_does_all_it_can() -> None:
    assert plan(1000, [1] * len(BRANCH_COUNTS)) == (MAX_DRAFT_TOKENS + 1, BRANCH_COUNTS[-1])


def test_branches_are_taken_as_far_as_the_targets_pass_leaves_time_for_them() -> None:
    # Six steps of which five are wide: 10 + 5 x 18 fits into 100, 10 + 5 x 30 does not.
    assert plan(100, [10, 12, 18, 30, 60]) == (6, 2)
    assert plan(100, [10, 200, 400, 800, 1600]) == (6, 0)


def test_a_draft_as_slow_as_the_target_goes_one_token_ahead() -> None:
    num_tokens, num_branches = plan(100, [100, 200, 300, 500, 900])
    assert (num_tokens, num_branches) == (1, 0)


def test_a_number_of_branches_that_was_asked_for_is_kept() -> None:
    assert plan(100, [10, 200, 400, 800, 1600], num_branches=3)[1] == 3
    assert plan(100, [10], num_branches=0) == (6, 0)


@pytest.mark.parametrize("caught", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_candidates", [0, 1, 5])
def test_the_model_of_rounds_is_what_happens(num_candidates: int, caught: float) -> None:
    acceptance, num_rounds = 0.7, 40_000
    generator = np.random.default_rng(0)
    is_ready, num_ready, num_tokens = False, 0, 0
    for _ in range(num_rounds):
        count = num_candidates if is_ready else 0
        num_ready += is_ready
        num_accepted = 0
        while num_accepted < count and generator.random() < acceptance:
            num_accepted += 1
        num_tokens += num_accepted + 1
        is_hit = num_accepted == count and generator.random() < acceptance
        is_ready = is_hit or generator.random() < caught
    assert tokens_per_pass(acceptance, num_candidates, caught) == pytest.approx(
        num_tokens / num_rounds, rel=0.02
    )
    assert ready_share(acceptance, num_candidates, caught) == pytest.approx(num_ready / num_rounds, abs=0.02)


def test_more_branches_catch_more() -> None:
    shares = [caught_share(count) for count in BRANCH_COUNTS]
    assert shares[0] == 0 and shares == sorted(shares) and shares[-1] < 1
