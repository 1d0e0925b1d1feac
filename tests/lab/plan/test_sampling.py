"""What sampling takes on a GPU, by what its kernels read and write."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from specdist.lab.plan.calibration import MeasuredSampling
from specdist.lab.plan.hardware import GPUS
from specdist.lab.plan.job import open_model
from specdist.lab.plan.roofline import (
    DRAFT_PASS,
    Placement,
    SamplingTimes,
    roofline_costs,
)
from specdist.lab.plan.simulate import Settings, predict
from specdist.models.sizes.sizes import ModelSize
from specdist.sampling.distributions import SamplingSettings

H100 = GPUS["h100-sxm"]
US = 1e-6
NUCLEUS = SamplingSettings(temperature=0.7, top_p=0.9)
BYTES_PER_S = 0.8 * 3350e9
LAUNCH_S = H100.kernel_s


def plain_s(num_rows: int) -> float:
    """Two kernels read a row's logits; the last one writes float32."""
    return num_rows * 128_256 * (2 * 2 + 4) / BYTES_PER_S + LAUNCH_S


def nucleus_s(num_rows: int) -> float:
    """Four kernels read them, and another one searches for the threshold."""
    return num_rows * 128_256 * (4 * 2 + 4) / BYTES_PER_S + 4 * LAUNCH_S


def draw_s(num_rows: int) -> float:
    return num_rows * 128_256 * 4 / BYTES_PER_S + LAUNCH_S


@pytest.fixture(scope="module")
def target() -> ModelSize:
    return dataclasses.replace(open_model("--target", "70b", "bfloat16")[0], vocab_size=128_256)


@pytest.fixture(scope="module")
def draft() -> ModelSize:
    return dataclasses.replace(open_model("--draft", "1b", "bfloat16")[0], vocab_size=128_256)


def times(model: ModelSize, settings: SamplingSettings, **changes: object) -> SamplingTimes:
    return SamplingTimes(gpu=dataclasses.replace(H100, **changes), model=model, settings=settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "process_s"),
    [
        (SamplingSettings(), plain_s),
        (NUCLEUS, nucleus_s),
        (dataclasses.replace(NUCLEUS, top_k=50), nucleus_s),
    ],
)
def test_a_draft_step_pays_for_its_kernels(
    draft: ModelSize, settings: SamplingSettings, process_s: Callable[[int], float]
) -> None:
    found = times(draft, settings)
    for num_rows in (1, 4, 32, 100):
        assert found.process_s(num_rows) == pytest.approx(process_s(num_rows))
        assert found.draft_s(num_rows) == pytest.approx(process_s(num_rows) + draw_s(num_rows))


def test_greedy_reads_the_logits_once(draft: ModelSize, target: ModelSize) -> None:
    greedy = SamplingSettings(temperature=0)
    assert times(draft, greedy).draft_s(32) == pytest.approx(32 * 128_256 * 2 / BYTES_PER_S)
    assert times(target, greedy).target_s(160, 32, 4) == pytest.approx(160 * 128_256 * 2 / 4 / BYTES_PER_S)


def test_a_nucleus_gathers_all_logits_of_a_sharded_target(target: ModelSize) -> None:
    row_bytes = 128_256 * 2
    next_s = 32 * 128_256 * 60 / BYTES_PER_S + draw_s(32)

    def gathered_s(num_rows: int) -> float:
        return num_rows * (0.75 * row_bytes / (0.7 * 450e9) + 2 * row_bytes / BYTES_PER_S)

    found = times(target, NUCLEUS)
    assert found.target_s(160, 32, 4) == pytest.approx(gathered_s(160) + nucleus_s(160) + next_s)
    assert found.target_s(160, 32, 1) == pytest.approx(nucleus_s(160) + next_s)
    # Without one every rank sums its part of each, and only next tokens' rows are gathered.
    normalised_s = 160 * 128_256 / 4 * 30 / BYTES_PER_S
    plain = times(target, SamplingSettings()).target_s(160, 32, 4)
    assert plain == pytest.approx(normalised_s + gathered_s(32) + plain_s(32) + next_s)


def test_what_was_measured_counts_for_its_filters_alone(draft: ModelSize) -> None:
    sampling = tuple(
        MeasuredSampling(
            filters="top_p", num_rows=rows, vocab_size=64_128, process_s=rows * US, draw_s=(4 + rows) * US
        )
        for rows in (160, 10)
    )
    found = times(draft, NUCLEUS, sampling=sampling)
    # Half way between both, and twice as many ids.
    assert found.process_s(85) == pytest.approx(170 * US) and found.draw_s(85) == pytest.approx(178 * US)
    assert times(draft, SamplingSettings(), sampling=sampling).process_s(85) == pytest.approx(plain_s(85))


def test_rounds_pay_for_it_and_prompts_do_not(target: ModelSize, draft: ModelSize) -> None:
    """Against the same plan without sampling: five steps and a pass of 192 tokens of 32 sequences."""

    def round_s(sampling: SamplingSettings | None, prompt_tokens: int) -> float:
        about = {"gpu": H100, "context_tokens": 1000.0, "sampling": sampling}
        costs = roofline_costs(
            Placement(model=target, tp_size=4, **about),  # type: ignore[arg-type]
            Placement(model=draft, counts=DRAFT_PASS, drafts=True, **about),  # type: ignore[arg-type]
            num_rows=32, most_tokens=4096, most_draft_rows=64,
        )  # fmt: skip
        settings = Settings(mode="colocated", num_rows=32, num_draft_tokens=5, acceptance=0.8)
        return predict(costs, settings, prompt_tokens=prompt_tokens, output_tokens=500).round_s

    wanted_s = 5 * (nucleus_s(32) + draw_s(32)) + times(target, NUCLEUS).target_s(192, 32, 4)
    for prompt_tokens in (0, 1000):
        added_s = round_s(NUCLEUS, prompt_tokens) - round_s(None, prompt_tokens)
        # A step between sizes of the curve.
        assert added_s == pytest.approx(wanted_s, rel=0.03)
