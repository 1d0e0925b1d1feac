"""What must hold of the closed form of a steady state; the emulation compares it with the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdist.lab.plan.simulate import Mode, Prediction, ReplicaCosts, Settings, predict
from specdist.policies.costs import CostModel, Curve

MS = 1_000_000
# A target's pass of 20 ms up to 64 tokens and in proportion beyond; draft steps of 1 ms and more.
COSTS = ReplicaCosts(
    passes=CostModel(
        Curve([1, 64, 1024], [20 * MS, 20 * MS, 320 * MS]), Curve([1, 64, 1024], [MS, 2 * MS, 20 * MS])
    ),
    draft_prefill=Curve([1, 64, 2048], [MS, MS, 32 * MS]),
    round_s=0.5e-3,
    proposal_s=0.2e-3,
)
ROWS = 8


def settings(mode: Mode, *, num_rows: int = ROWS, length: int = 5, caught: float = 0.5) -> Settings:
    return Settings(
        mode=mode,
        num_rows=num_rows,
        num_draft_tokens=0 if mode == "target only" else length,
        acceptance=0.8,
        caught=caught,
    )


def decoding(mode: Mode, **options: int | float) -> Prediction:
    return predict(COSTS, settings(mode, **options))  # type: ignore[arg-type]


def test_each_mode_costs_what_it_does() -> None:
    step, wide_step, catch_up = 1 + 7 / 63, 1 + 31 / 63, 1 + (8 * (1 + 0.8**5) - 1) / 63
    assert decoding("target only").round_s == pytest.approx(20.5e-3)
    in_turn = 20.5 + catch_up + 4 * step
    assert decoding("colocated").round_s == pytest.approx((in_turn + 0.2) / 1e3)
    assert decoding("synchronous").round_s == pytest.approx((in_turn + 0.2) / 1e3)
    # Six steps, and with branches for half of the misses (three per row) five of them four times as wide.
    assert decoding("asynchronous").round_s == pytest.approx(20.7e-3)
    assert decoding("asynchronous").draft_share == pytest.approx(6 * step / 20.7)
    assert decoding("branches").draft_share == pytest.approx((step + 5 * wide_step) / 20.7)
    # With 8 rows of 31 tokens the target is the slower one only as often as they are ready.
    alone = decoding("asynchronous", num_rows=1, length=30)
    assert alone.round_s == pytest.approx(31.7e-3)
    assert alone.target_share == pytest.approx(20 / 31.7)


def test_prompts_take_their_time_where_passes_are_bound_by_arithmetic() -> None:
    plain = settings("target only")
    without = predict(COSTS, plain)
    short = predict(COSTS, plain, prompt_tokens=10, output_tokens=100)
    long = predict(COSTS, plain, prompt_tokens=1000, output_tokens=100)
    # Ten tokens join a pass of 8 below the bend, and cost nothing.
    assert short.tokens_per_s == pytest.approx(without.tokens_per_s)
    # A thousand tokens per hundred generated: 0.08 prompts a round, each 944 tokens beyond the bend.
    assert long.round_s - without.round_s == pytest.approx(0.08 * 944 * 0.3125e-3)
    assert long.prefill_share == pytest.approx(1 - without.round_s / long.round_s)


def test_a_block_is_one_pass_whatever_is_drawn_of_it() -> None:
    passes = replace(COSTS.passes, draft=Curve([1], [10_000]), synchronous=Curve([1], [3_000_000]))
    costs = replace(COSTS, passes=passes, drafts_blocks=True)
    for length in (2, 5):
        found = predict(costs, settings("colocated", length=length))
        tokens = ROWS * (1 + length)
        target = 20.0 if tokens <= 64 else tokens * 20 / 64
        assert found.round_s == pytest.approx((0.5 + 0.2 + target + 3 + length * 0.01) / 1e3), length
