"""Passes from sizes and peaks."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from specdist.lab.plan.hardware import (
    CACHE_RATE,
    EAGER_KERNEL_S,
    GPUS,
    GRAPH_S,
    KERNEL_S,
    LINK_EFFICIENCY,
    ONE_SHOT_LATENCY_S,
    SYNCHRONISATION_S,
    find_gpu,
)
from specdist.lab.plan.roofline import (
    DRAFT_PASS,
    NO_COUNTS,
    PACKING_S,
    TARGET_PASS,
    PassCounts,
    Placement,
)
from specdist.lab.plan.shapes import SHAPES
from specdist.models.quantized.quantized import requested_format
from specdist.models.sizes.sizes import ModelSize, model_size
from specdist.utils.errors import UserError
from tests.job.memory_plans import llama_1b, llama_70b
from tests.ranks import REPOSITORY

HALF_BYTES = 2
TP_SIZE = 4
LONG = 16_384


@pytest.fixture
def target() -> ModelSize:
    """Llama 3.3 70B."""
    return llama_70b()


@pytest.fixture
def draft() -> ModelSize:
    """Llama 3.2 1B."""
    return llama_1b()


def test_published_sizes(target: ModelSize, draft: ModelSize) -> None:
    assert target.num_parameters == 70_553_706_496
    assert llama_1b().num_parameters == 1_235_814_400


def test_a_pass_reads_until_it_computes(target: ModelSize) -> None:
    gpu = GPUS["h100-sxm"]
    placement = Placement(model=target, gpu=gpu, context_tokens=0, counts=NO_COUNTS)
    reading_s = target.streamed_bytes(1) / gpu.sustained_bytes_per_s
    assert placement.pass_s(1, 1) == placement.pass_s(200, 200) == pytest.approx(reading_s)
    per_token_s = target.flops_per_token(1) / gpu.sustained_flops_per_s(HALF_BYTES)
    assert placement.pass_s(1000, 1) == pytest.approx(1000 * per_token_s)


def test_ranks_share_the_work_and_pay_for_their_sums(target: ModelSize) -> None:
    gpu = GPUS["h100-sxm"]
    alone, shared = (
        Placement(model=target, gpu=gpu, tp_size=tp_size, context_tokens=0, counts=NO_COUNTS).pass_s(8, 8)
        for tp_size in (1, TP_SIZE)
    )
    # 160 sums of at least a kernel's latency: 0.8 ms beside a quarter of the reading.
    sums_s = 160 * gpu.all_reduce_s(8 * 8192 * HALF_BYTES, TP_SIZE, reads_peers=True)
    assert sums_s > 0.8e-3
    assert shared == pytest.approx(alone / TP_SIZE + sums_s, rel=0.001)


def test_a_sum_over_ranks_takes_its_latency_and_its_bytes() -> None:
    gpu = GPUS["h100-sxm"]
    assert gpu.all_reduce_s(1e6, 1) == 0
    sent_s = 1.5 * 1e6 / (LINK_EFFICIENCY * gpu.link_bytes_per_s)
    assert gpu.all_reduce_s(1e6, 4) == pytest.approx(gpu.link_latency_s + sent_s)
    # One kernel that reads all peers' is faster for short messages, and over NVLink alone.
    read_s = 3 * 1e5 / (LINK_EFFICIENCY * gpu.link_bytes_per_s)
    assert gpu.all_reduce_s(1e5, 4, reads_peers=True) == pytest.approx(ONE_SHOT_LATENCY_S + read_s)
    assert gpu.all_reduce_s(1e8, 4, reads_peers=True) == gpu.all_reduce_s(1e8, 4)
    assert GPUS["l40s"].all_reduce_s(1e5, 4, reads_peers=True) == GPUS["l40s"].all_reduce_s(1e5, 4)


def test_kernels_launches_and_waits_are_paid_for_by_their_number() -> None:
    counts = PassCounts(
        kernels_per_layer=10,
        kernels_outside_of_layers=5,
        eager_kernels=3,
        copies=2,
        replays=1,
        synchronisations=4,
        tensors_per_layer=6,
    )
    gpu, draft = GPUS["h100-sxm"], llama_1b()
    plain, counted = (
        Placement(model=draft, gpu=gpu, context_tokens=0, counts=counts) for counts in (NO_COUNTS, counts)
    )
    launches_s = 165 * KERNEL_S + 5 * EAGER_KERNEL_S + GRAPH_S + 4 * SYNCHRONISATION_S + PACKING_S
    # 16 layers, in which 6 tensors of 2048 numbers are read or written from the device's cache.
    between_s = 16 * 6 * 2048 * HALF_BYTES / (2 * gpu.sustained_bytes_per_s)
    for num_tokens in (1, 100):
        found_s = counted.pass_s(num_tokens, 1) - plain.pass_s(num_tokens, 1)
        assert found_s == pytest.approx(launches_s + num_tokens * between_s)


def test_the_cache_is_read_for_every_row(target: ModelSize) -> None:
    gpu = GPUS["h100-sxm"]
    near, far = (Placement(model=target, gpu=gpu, context_tokens=tokens) for tokens in (0, LONG))
    read_s = 64 * LONG * target.cache_bytes_per_token(1) / (CACHE_RATE * gpu.sustained_bytes_per_s)
    assert far.pass_s(64, 64) - near.pass_s(64, 64) == pytest.approx(read_s)


def test_a_cache_in_eight_bits_takes_a_scale_of_each_head(target: ModelSize) -> None:
    narrow = dataclasses.replace(target, has_float8_cache=True)
    # A head's 128 numbers have a scale of two bytes.
    assert target.cache_bytes_per_token(2) * 130 == narrow.cache_bytes_per_token(2) * 256
    assert target.cache_read_bytes(2, 100) * 130 == narrow.cache_read_bytes(2, 100) * 256


def test_names_of_gpus() -> None:
    assert find_gpu("H100-SXM", "bfloat16") is GPUS["h100-sxm"]
    with pytest.raises(UserError, match=r"--gpu h1000 is not in the table: choose one of .*h100-sxm"):
        find_gpu("h1000", "bfloat16")
    with pytest.raises(UserError, match=r"--dtype bfloat16 .*v100-32.* use --dtype float16"):
        find_gpu("v100-32", "bfloat16")


def test_quantised_products_have_the_rates_that_were_measured() -> None:
    """One matrix's over those of all bfloat16 matrices of the 8B's layer, on one H200."""
    kernels, costs = (
        json.loads((REPOSITORY / f"jobs/benchmarks/h200/{name}.json").read_text(encoding="utf-8"))
        for name in ("kernels", "costs")
    )
    of_layer = [one for one in costs["products"] if (one["model"], one["dtype"]) == ("8B", "bfloat16")]
    plain = {one["num_tokens"]: one for one in of_layer}
    for kind, kernel in (
        ("float8", "_scaled_mm by rows"), ("int8", "_int_mm"), ("int8 weights", "_weight_int8pack_mm"),
        ("int4 weights", "_weight_int4pack_mm"),
    ):  # fmt: skip
        found = [one for one in kernels["kernels"] if one["kernel"] == f"{kind}: torch.{kernel}"]
        narrow = {one["size"]: one for one in found}
        reads = narrow["1 tokens"]["gb_per_s"] / plain[1]["gb_per_s"]
        computes = narrow["2048 tokens"]["tflop_per_s"] / plain[2048]["tflop_per_s"]
        assert GPUS["h200"].products[kind] == pytest.approx((reads, computes), rel=0.02)


def test_what_products_of_few_tokens_may_bring_on_an_h200(draft: ModelSize) -> None:
    """An estimate: milliseconds of the device for a token of an 8B, and for a step of a 1B. Their weights at
    85% of the memory's peak (assumed: copies reach 90%, cuBLAS 64%); all other kernels, as they are counted,
    each in the time that they took in a pass that was measured, when a layer had 14 with seven products."""
    costs, graphs = (
        json.loads((REPOSITORY / f"jobs/benchmarks/h200/{name}.json").read_text(encoding="utf-8"))
        for name in ("costs", "graphs")
    )
    large = model_size("8b", SHAPES["8b"].llama_config(torch.bfloat16), HALF_BYTES)
    layer = next(one for one in costs["products"] if (one["model"], one["num_tokens"]) == ("8B", 1))
    head_s = HALF_BYTES * 128_256 * 4096 / costs["costs"]["read_bytes_per_s"]
    outside = TARGET_PASS.kernels_outside_of_layers
    of_others_s = graphs["passes"][0]["replayed_s"] - 32 * layer["seconds"] - head_s
    other_s = of_others_s / (32 * (14 - 7) + outside)
    for model, counts, most_ms in ((large, TARGET_PASS, 4.3), (draft, DRAFT_PASS, 0.85)):
        # The activation is in the product before it; four are products.
        num_others = counts.kernels(len(model.layers)) - (1 + 4) * len(model.layers)
        reading_s = model.streamed_bytes(1) / (0.85 * GPUS["h200"].bandwidth_bytes_per_s)
        assert round(1e3 * (reading_s + num_others * other_s), 2) <= most_ms


@pytest.mark.parametrize("name", ["h100-sxm", "h200", "b200", "l40s"])
def test_float8_is_slower_than_bfloat16_at_every_size_until_another_is_measured(
    target: ModelSize, name: str
) -> None:
    form = requested_format("float8", 8192)
    assert form is not None and form.product == "float8"
    narrow = dataclasses.replace(
        target, num_quantized=target.num_cut, quantized_bytes=target.num_cut, product=form.product
    )

    def matrices_s(model: ModelSize, name: str, num_tokens: int) -> float:
        return Placement(model=model, gpu=GPUS[name], context_tokens=0).matrices_s(num_tokens)

    for num_tokens, factor in ((1, 1 / 0.35 / 2), (160, None), (4096, 1 / 0.88)):
        found = matrices_s(narrow, name, num_tokens) / matrices_s(target, name, num_tokens)
        assert found > 1 and (factor is None or found == pytest.approx(factor, rel=0.02))
    # For int8 a B300 has a fifteenth of its bfloat16 rate, and a B200 is as measured.
    integers = dataclasses.replace(narrow, product="int8")
    assert matrices_s(integers, "b300", 4096) > 7 * matrices_s(integers, "b200", 4096)
    # Without products of FP8 every layer is written in plain numbers, and read again.
    assert matrices_s(narrow, "a100-80", 1) > 2 * matrices_s(target, "a100-80", 1)


def test_prompts_attend_to_half_of_themselves_at_a_rate_of_its_own(target: ModelSize) -> None:
    """2,048 tokens of prompts of 16,384: two products of 64 heads of 128 in 80 layers with 8,192 keys."""
    gpu = GPUS["h100-sxm"]
    found, without = (
        Placement(model=target, gpu=gpu, context_tokens=2 * LONG, prompt_tokens=tokens).prompt_s(2048)
        for tokens in (LONG, 0)
    )
    flops = 2048 * 80 * 2 * 64 * 2 * 128 * LONG / 2
    assert found - without == pytest.approx(flops / (0.33 * gpu.sustained_flops_per_s(2)))
