"""What the planner reckons for mixtures of experts: parameters, the experts that a pass reads, its time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from transformers import AutoConfig

from specdist.lab.plan.advise import Planner, Site, Work
from specdist.lab.plan.hardware import GPUS
from specdist.lab.plan.job import open_model
from specdist.lab.plan.options import PlanConfig
from specdist.lab.plan.report import run_options
from specdist.lab.plan.roofline import NO_COUNTS, Placement
from specdist.models.sizes.layer_sizes import Experts
from specdist.models.sizes.sizes import ModelSize, model_size
from specdist.utils.host import GIB
from tests.lab.plan.test_job import planned

QWEN, GPT_OSS = "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-120b"
# By hand from config.json of Qwen/Qwen3-30B-A3B: 48 layers; queries and their output of 32 heads of 128, keys
# and values of 4; norms; a router; 128 experts of three matrices; a head beside the embedding.
ATTENTION = 2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 2048 + 2 * 128
ROUTER, EXPERT = 128 * 2048, 3 * 2048 * 768
TABLE = 151_936 * 2048
DENSE = 48 * (ATTENTION + ROUTER) + 2048 + TABLE
GPU = GPUS["h100-sxm"]


def named(name: str) -> ModelSize:
    return open_model("--target", name, "auto")[0]


@pytest.fixture(scope="module")
def qwen() -> ModelSize:
    return named(QWEN)


def chosen_by(rng: np.random.Generator, experts: Experts, num_tokens: int, spread: float) -> int:
    """Distinct experts of tokens that draw theirs without replacement, by scores of which some are higher."""
    favour = spread * rng.standard_normal(experts.num_experts)
    scores = favour + rng.gumbel(size=(num_tokens, experts.num_experts))
    return len(np.unique(np.argpartition(-scores, experts.num_chosen - 1)[:, : experts.num_chosen]))


@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "num_tokens"),
    [(128, 8, 2), (128, 8, 9), (8, 2, 3)],
)
def test_expected_experts_are_those_of_simulated_routing(
    num_experts: int, num_chosen: int, num_tokens: int
) -> None:
    """Within five standard errors; where routing has favourites, there are fewer."""
    experts, rng = Experts(1, num_experts, num_chosen, 1, 1), np.random.default_rng(0)
    uniform, skewed = (
        np.array([chosen_by(rng, experts, num_tokens, spread) for _ in range(400)]) for spread in (0.0, 1.0)
    )
    expected, error = experts.num_distinct(num_tokens), uniform.std() / len(uniform) ** 0.5
    assert abs(uniform.mean() - expected) <= 5 * error + 1e-9
    assert skewed.mean() <= expected + 1e-9
    assert num_tokens == 1 or skewed.mean() < uniform.mean() - 5 * error


def test_parameters_of_published_mixtures(qwen: ModelSize) -> None:
    assert qwen.num_parameters == 30_532_122_624 == DENSE + TABLE + 48 * 128 * EXPERT
    assert qwen.num_active == DENSE + 48 * 8 * EXPERT
    # Published: 3.3B, with the table of the embedding.
    assert 3.3e9 < qwen.num_active + TABLE < 3.4e9
    # OpenAI's model card: 116.83B in all, 5.13B active.
    other = named(GPT_OSS)
    assert (round(other.num_parameters / 1e9, 2), round(other.num_active / 1e9, 2)) == (116.83, 5.13)
    assert [layer.window for layer in other.layers[:2]] == [128, None]


def test_quantised_experts_are_planned_as_they_are_held() -> None:
    """gpt-oss as published: 17 bytes of 32 numbers, and over four ranks, whose parts of an expert end within
    a group, 18 for those that are cut. Its model card gives 60.8 GiB."""
    size = named(GPT_OSS)
    (experts,) = size.experts
    num_biases = 5760 + 2880
    num_numbers = experts.num_numbers - num_biases
    for tp_size, group_bytes in ((1, 17), (2, 17), (4, 18), (8, 20)):
        held = (num_numbers // 32 * group_bytes + 2 * num_biases) / tp_size
        # The first matrix of gpt-oss is cut between whole groups, whatever the number of ranks.
        first = 5760 * 2880 // 32 * (group_bytes - 17) / tp_size
        assert experts.rank_bytes(tp_size, 2) == held - first
    assert round(size.weight_bytes(1) / GIB, 1) == 60.8
    plain = dataclasses.replace(size, experts=(dataclasses.replace(experts, form=None),))
    assert plain.weight_bytes(1) / GIB > 217
    token = plain.expert_bytes(1, 1) / size.expert_bytes(1, 1)
    assert token == pytest.approx(16 / 4.25, rel=1e-3)


def test_experts_are_planned_without_the_quantisation_that_is_asked_for() -> None:
    """The figures count them as plain, and the plan says what that is."""
    site = ["--gpu", "h100-sxm", "--target_quantization", "float8", "--target"]
    text, document = planned(*site, QWEN)
    experts = 2 * 48 * 128 * EXPERT
    assert experts < document["memory"][0]["target"]["weight_bytes"] < experts + 1.5 * DENSE + 2 * TABLE
    assert f"not the experts of {QWEN}, which take {experts / GIB:.2f} of its" in text
    assert "experts" not in planned(*site, "8b")[0]


@pytest.mark.parametrize("num_tokens", [1, 9, 64])
def test_a_pass_reads_what_was_counted_by_hand(qwen: ModelSize, num_tokens: int) -> None:
    distinct = {1: 8, 9: 128 - 128 * (120 / 128) ** 9, 64: 128 * (1 - 0.9375**64)}
    read = 2 * (DENSE + 48 * distinct[num_tokens] * EXPERT)
    assert qwen.streamed_bytes(1) + qwen.expert_bytes(1, num_tokens) == pytest.approx(read, rel=1e-12)
    assert qwen.flops_per_token(1) + qwen.expert_flops(1, 1) == pytest.approx(2 * qwen.num_active, rel=0.01)
    found = Placement(model=qwen, gpu=GPU, context_tokens=0, counts=NO_COUNTS).pass_s(num_tokens, num_tokens)
    assert found == pytest.approx(read / GPU.sustained_bytes_per_s, rel=1e-9)


def test_experts_compute_whole_tiles_of_tokens() -> None:
    """gpt-oss-120b in MXFP4 with 512 tokens: 16 for each of 128 experts, and half a tile of 64."""
    placement = Placement(model=named(GPT_OSS), gpu=GPU, context_tokens=0)
    (experts,) = placement.model.experts
    distinct = 128 * (1 - (124 / 128) ** 512)
    flops = 36 * 2 * experts.num_numbers * (512 * 4 + 63 / 2 * distinct)
    assert placement.experts_s(512) == pytest.approx(flops / (0.6 * GPU.sustained_flops_per_s(2)))
    # They take longer than to be read, which would do without tiles.
    assert placement.experts_s(512) > placement.model.expert_bytes(1, 512) / GPU.sustained_bytes_per_s


def test_ranks_share_experts_and_all_of_them_take_memory(qwen: ModelSize) -> None:
    assert qwen.weight_bytes(1) == 2 * qwen.num_parameters
    whole = 2 * (48 * (2 * 2048 + 2 * 128 + ROUTER) + 2048 + TABLE)
    assert qwen.weight_bytes(4) == whole + (qwen.weight_bytes(1) - whole) // 4
    assert qwen.expert_bytes(4, 9) == qwen.expert_bytes(1, 9) / 4
    assert qwen.expert_flops(4, 9) == qwen.expert_flops(1, 9) / 4
    assert qwen.expert_flops(4, 9, 64) == pytest.approx(qwen.expert_flops(1, 9, 64) / 4)


@pytest.mark.parametrize("num_tokens", [9, 200])
def test_the_fullest_rank_has_what_a_simulation_of_whole_experts_gives(
    qwen: ModelSize, num_tokens: int
) -> None:
    """At most a fifth more, since it is a bound."""
    generator = np.random.default_rng(0)
    scores = generator.random((300, num_tokens, 128))
    chosen = scores.argpartition(8, axis=2)[:, :, :8] // 16
    experts = scores.argpartition(8, axis=2)[:, :, :8]
    pairs = np.array([np.bincount(each.ravel(), minlength=8).max() for each in chosen])
    reads = np.array([
        np.bincount(np.unique(each) // 16, minlength=8).max() for each in experts
    ])  # fmt: skip
    (counted,) = qwen.experts
    for found, expected in (
        (counted.num_read(num_tokens, 8, is_whole=True), reads.mean()),
        (counted.num_pairs(num_tokens, 8, is_whole=True), pairs.mean()),
    ):
        assert 0.99 * expected <= found <= 1.2 * expected


def test_experts_are_whole_where_their_parts_would_be_narrow(qwen: ModelSize) -> None:
    """Of 768 numbers four ranks have 192 each, three tiles, and eight have 96, one and a half."""
    whole = qwen.with_experts_for(8, 128)
    assert whole.has_whole_experts and not qwen.with_experts_for(4, 128).has_whole_experts
    assert not qwen.with_experts_for(8, 1).has_whole_experts, "one token's experts are mostly on few ranks"
    assert qwen.with_experts_for(5, 1).has_whole_experts, "they do not divide the width"
    assert qwen.with_experts_for(256, 128).why_no_whole_experts(256) == (
        "its 128 experts are fewer than the 256 ranks"
    )
    assert whole.weight_bytes(8) == qwen.weight_bytes(8)
    # Of 128 experts one of five ranks has 26.
    apart = whole.weight_bytes(5) - qwen.weight_bytes(5)
    assert apart == pytest.approx(2 * 48 * (26 - 128 / 5) * EXPERT, abs=2)
    assert whole.expert_bytes(8, 1000) == qwen.expert_bytes(8, 1000)
    assert whole.expert_bytes(8, 9) > qwen.expert_bytes(8, 9)


def test_a_plan_shares_experts_out_as_it_is_told(qwen: ModelSize) -> None:
    site = Site(gpu=GPU, gpus_per_node=4, num_nodes=1, max_num_seqs=64)
    work = Work(prompt_tokens=512, output_tokens=256, num_prompts=1000, acceptance=0.7, caught=0.5)
    found = {}
    for how in ("auto", "always", "never"):
        planner = Planner(qwen, None, site, dataclasses.replace(work, expert_parallel=how))
        found[how] = {plan.tp_size: plan for plan in planner._plans("target only")}
    assert {*found["always"]} == {1, 2, 4}
    assert [plan.has_whole_experts for plan in found["always"].values()] == [False, True, True]
    assert not any(plan.has_whole_experts for how in ("auto", "never") for plan in found[how].values())
    assert found["auto"][4].tokens_per_s > found["always"][4].tokens_per_s
    options = run_options(
        PlanConfig(target="t", gpu="h100-sxm"), found["always"][4], work, max_positions=4096
    )
    assert options["expert_parallel"] == "always"
    # 5 ranks do not divide the width, and nobody may have whole ones.
    assert qwen.with_experts_for(5, 9, "never") is None and qwen.with_experts_for(129, 9) is None


SIZES = {
    "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
# Layers with experts, experts, those of a token, numbers of one, and its inner width.
MIXED = {
    "qwen3_moe": (
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "mlp_only_layers": [0, 2]},
        (2, 8, 3, 3 * 64 * 16, 16),
    ),
    # The first layer is dense, and there is a shared expert.
    "deepseek_v3": (
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2,
         "first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
         "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
        (3, 8, 2, 3 * 64 * 16, 16),
    ),
    # With biases, and matrices the other way round.
    "gpt_oss": (
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16},
        (4, 8, 2, 3 * 64 * 32 + 2 * 32 + 64, 32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", MIXED)
def test_experts_of_every_kind_of_layer_are_found(family: str) -> None:
    sizes, expected = MIXED[family]
    size = model_size(family, AutoConfig.for_model(family, **{**SIZES, **sizes}), 4)
    assert size.experts == (Experts(*expected),)
    assert size.weight_bytes(1) == 4 * size.num_parameters
    layers, num_experts, num_chosen, numbers, _ = expected
    idle = layers * (num_experts - num_chosen) * numbers
    assert size.num_active == size.num_parameters - idle - (0 if size.is_tied else size.num_embedding)


def test_a_mixture_is_planned_by_its_name() -> None:
    text, document = planned("--target", QWEN, "--gpu", "h100-sxm")
    assert f"{QWEN} (30.53B, 3.04B of them active)" in text
    assert document["num_parameters"]["target"] > 10 * document["num_active"]["target"]
    one, all_experts = (2 * (DENSE + 48 * count * EXPERT) / GIB for count in (8, 128))
    assert f"{one:.1f} GiB for a token" in text and all_experts > 56
    assert document["memory"][0]["target"]["weight_bytes"] == 2 * 30_532_122_624
