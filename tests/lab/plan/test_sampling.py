"""What sampling takes on a GPU, by the sweeps of its kernels over a row's logits."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from specdist.lab.plan.calibration import MeasuredSampling
from specdist.lab.plan.hardware import GPUS
from specdist.lab.plan.job import open_model
from specdist.lab.plan.roofline import (
    DRAFT_PASS,
    DRAW_BLOCK,
    DRAW_INSTRUCTIONS,
    FILTERED_LOOPS,
    NO_COUNTS,
    NUM_DIGITS,
    PLAIN_LOOPS,
    PROCESS_BLOCK,
    PROGRAMS_PER_MULTIPROCESSOR,
    WARPS_PER_SCHEDULER,
    Placement,
    SamplingTimes,
    roofline_costs,
)
from specdist.lab.plan.simulate import Settings, predict
from specdist.models.files.sizes import ModelSize
from specdist.sampling.distributions import SamplingSettings
from tests.ranks import REPOSITORY

H100 = GPUS["h100-sxm"]
US = 1e-6
NUCLEUS = SamplingSettings(temperature=0.7, top_p=0.9)
BYTES_PER_S = 0.8 * 3350e9
# 128,256 ids are 32 blocks of 4,096; each of three loops over them waits 600 cycles of 1.7 GHz for a block,
# and issues the instructions of four warps: of the largest, the sum and the probabilities 64, 103 and 131.
WAITING_S, PLAIN_ISSUE_S = 3 * 32 * 600 / 1.7e9, 32 * 4 * (64 + 103 + 131) / 1.7e9
PLAIN_S = WAITING_S + PLAIN_ISSUE_S
# With filters the likely ids are listed instead, and what is listed is searched for four digits.
SEARCH_WAITING_S, SEARCH_ISSUE_S = 4 * 4 * 600 / 1.7e9, 4 * 4 * (300 + 4 * 68) / 1.7e9
LISTING_ISSUE_S = 32 * 4 * (64 + 167 + 147) / 1.7e9
SEARCH_S = SEARCH_WAITING_S + SEARCH_ISSUE_S
NUCLEUS_S = WAITING_S + LISTING_ISSUE_S + SEARCH_S
# Of more rows than multiprocessors, two wait together.
TWO_NUCLEI_S = NUCLEUS_S + LISTING_ISSUE_S + SEARCH_ISSUE_S
DRAW_S = 63 * (600 + 4 * 80) / 1.7e9


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
        (SamplingSettings(), PLAIN_S),
        (NUCLEUS, NUCLEUS_S),
        # A second search.
        (dataclasses.replace(NUCLEUS, top_k=50), NUCLEUS_S + SEARCH_S),
        # No filter.
        (SamplingSettings(top_k=200_000), PLAIN_S),
    ],
)
def test_a_draft_step_pays_for_sweeps_and_digits(
    draft: ModelSize, settings: SamplingSettings, process_s: float
) -> None:
    found = times(draft, settings)
    assert 50 * US < found.process_s(1) == found.process_s(100) == pytest.approx(process_s)
    assert found.process_s(133) > 1.3 * process_s
    # Many are as fast as their logits are read, three times, and their probabilities written.
    assert found.process_s(528) == pytest.approx(528 * 128_256 * (3 * 2 + 4) / BYTES_PER_S)
    assert found.draft_s(32) == pytest.approx(process_s + DRAW_S)


def test_greedy_reads_the_logits_once(draft: ModelSize, target: ModelSize) -> None:
    greedy = SamplingSettings(temperature=0)
    assert times(draft, greedy).draft_s(32) == pytest.approx(32 * 128_256 * 2 / BYTES_PER_S)
    assert times(target, greedy).target_s(160, 32, 4) == pytest.approx(160 * 128_256 * 2 / 4 / BYTES_PER_S)


def test_a_nucleus_gathers_all_logits_of_a_sharded_target(target: ModelSize) -> None:
    row_bytes = 128_256 * 2
    next_s = 32 * 128_256 * 60 / BYTES_PER_S + DRAW_S

    def gathered_s(num_rows: int) -> float:
        return num_rows * (0.75 * row_bytes / (0.7 * 450e9) + 2 * row_bytes / BYTES_PER_S)

    found = times(target, NUCLEUS)
    assert found.target_s(160, 32, 4) == pytest.approx(gathered_s(160) + TWO_NUCLEI_S + next_s)
    assert found.target_s(160, 32, 1) == pytest.approx(TWO_NUCLEI_S + next_s)
    # Without one every rank sums its part of each, and only next tokens' rows are gathered.
    normalised_s = 160 * 128_256 / 4 * 30 / BYTES_PER_S
    plain = times(target, SamplingSettings()).target_s(160, 32, 4)
    assert plain == pytest.approx(normalised_s + gathered_s(32) + PLAIN_S + next_s)


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
    assert times(draft, SamplingSettings(), sampling=sampling).process_s(85) == pytest.approx(PLAIN_S)


def test_only_tokens_whose_logits_are_wanted_are_sampled_from(target: ModelSize, draft: ModelSize) -> None:
    about = {"gpu": H100, "context_tokens": 1000.0, "counts": NO_COUNTS}
    plain = Placement(model=target, tp_size=4, **about)  # type: ignore[arg-type]
    found = dataclasses.replace(plain, sampling=NUCLEUS)
    sampled_s = times(target, NUCLEUS).target_s(160, 32, 4)
    assert found.pass_s(160, 32) == pytest.approx(plain.pass_s(160, 32) + sampled_s)
    assert found.pass_s(2048, 32, 160) == pytest.approx(plain.pass_s(2048, 32) + sampled_s)
    assert found.pass_s(2048, 32, 0) == plain.pass_s(2048, 32)
    small = Placement(model=draft, sampling=NUCLEUS, drafts=True, **about)  # type: ignore[arg-type]
    without_s = dataclasses.replace(small, sampling=None).pass_s(32, 32)
    assert small.pass_s(32, 32) == pytest.approx(without_s + NUCLEUS_S + DRAW_S)


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

    wanted_s = 5 * (NUCLEUS_S + DRAW_S) + times(target, NUCLEUS).target_s(192, 32, 4)
    for prompt_tokens in (0, 1000):
        added_s = round_s(NUCLEUS, prompt_tokens) - round_s(None, prompt_tokens)
        # A step between sizes of the curve.
        assert added_s == pytest.approx(wanted_s, rel=0.03)


def test_the_kernels_are_those_that_are_counted() -> None:
    """Their sizes, and the longest of their loops as compiled for sm_90."""
    kernels = pytest.importorskip("specdist.kernels.sampling", reason="Triton is not installed")
    compiled = json.loads((REPOSITORY / "tests/kernels/compiled.json").read_text(encoding="utf-8"))
    longest = {one["name"]: one["loop_instructions"] for one in compiled if one["capability"] == 90}
    assert longest["process, temperature alone (bfloat16)"] == pytest.approx(max(PLAIN_LOOPS), rel=0.1)
    assert longest["process, top-p (bfloat16)"] == pytest.approx(max(FILTERED_LOOPS), rel=0.1)
    assert longest["draw"] == pytest.approx(DRAW_INSTRUCTIONS, rel=0.1)
    assert kernels.THREADS * kernels.NUM_READ.value == PROCESS_BLOCK and kernels.BLOCK == DRAW_BLOCK
    assert kernels.NUM_WARPS == 4 * WARPS_PER_SCHEDULER
    # Of 65,536 registers.
    assert 2**16 // (kernels.THREADS * kernels.PROCESS_OPTIONS["maxnreg"]) == PROGRAMS_PER_MULTIPROCESSOR
    dtypes = {
        dtype.itemsize: digits for dtype, digits in kernels.NUM_DIGITS.items() if dtype != torch.float16
    }
    assert dtypes == NUM_DIGITS
