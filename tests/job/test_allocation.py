"""The memory plan of a rank: sums for GPUs of any size, and the messages for those that are too small."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import yaml
from transformers import LlamaConfig

from specdist.config.groups import GPU_SEQS_WITH_DRAFT
from specdist.job.costs.allocation import (
    PAGE_SIZE,
    BatchLimits,
    HeldModel,
    _num_communicators,
    draft_limits,
    refusal,
    room_on_gpu,
    sampling_of,
    target_limits,
)
from specdist.job.ranks.topology import Topology
from specdist.lab.plan.hardware import GPUS
from specdist.lab.plan.memory import fit
from specdist.models.loading.memory import DeviceMemory
from specdist.models.sizes.reserve import Sampling
from specdist.models.sizes.sizes import ModelSize, model_size
from specdist.policies.registry import most_draft_tokens, resolve_policy_options
from tests.job.memory_plans import GIB, config_of, llama_1b, llama_8b, llama_70b, rows
from tests.ranks import REPOSITORY
from tests.readme import documentation

H100 = GPUS["h100-sxm"]
CONTEXT_BYTES = GIB
TOP_P = Sampling(has_top_p=True)


@pytest.fixture
def large() -> ModelSize:
    return llama_70b()


@pytest.fixture
def middle() -> ModelSize:
    return llama_8b()


@pytest.fixture
def small() -> ModelSize:
    return llama_1b()


def loaded(*held: tuple[ModelSize, int], total_bytes: int = H100.memory_bytes) -> DeviceMemory:
    """A GPU with these models on it, and the memory of the driver."""
    weights = sum(size.weight_bytes(tp_size) for size, tp_size in held)
    return DeviceMemory(total_bytes=total_bytes, free_bytes=max(0, total_bytes - CONTEXT_BYTES - weights))


def target_on(size: ModelSize, tp_size: int, limits: BatchLimits, sampling: Sampling = TOP_P) -> HeldModel:
    return HeldModel(size=size, tp_size=tp_size, limits=target_limits(limits, sampling))


@pytest.mark.parametrize(
    ("tp_size", "world_size", "uses_draft", "numbers"),
    [
        (1, 1, True, [0]),
        (1, 2, True, [1, 1]),
        (2, 2, False, [1, 1]),
        (2, 2, True, [1, 1]),
        (2, 3, True, [2, 1, 1]),
    ],
)
def test_a_rank_plans_memory_for_the_communicators_that_it_has(
    tp_size: int, world_size: int, uses_draft: bool, numbers: list[int]
) -> None:
    ranks = [
        Topology(
            rank=rank, world_size=world_size, tp_size=tp_size, uses_draft=uses_draft,
            device=torch.device("cpu"),
        )
        for rank in range(world_size)
    ]  # fmt: skip
    assert [_num_communicators(rank) for rank in ranks] == numbers


def test_scored_prompts_need_the_logits_of_a_whole_pass() -> None:
    scored = dataclasses.replace(TOP_P, scores_prompts=True)
    found = [target_limits(rows(max_num_batched_tokens=4096), each).num_logits for each in (TOP_P, scored)]
    assert found[0] < found[1] == 4096


def test_the_readmes_sum_is_that_of_its_configuration(large: ModelSize, small: ModelSize) -> None:
    """If it differs, put the line that this prints between the markers."""
    options = yaml.safe_load((REPOSITORY / "jobs/configs/llama-70b.yaml").read_text(encoding="utf-8"))
    drafts = resolve_policy_options("goodput", {})
    most = most_draft_tokens(drafts)
    limits = rows(num_rows=GPU_SEQS_WITH_DRAFT, max_draft_tokens=most, shares_room=True)
    held = [
        target_on(large, 4, limits),
        HeldModel(size=small, tp_size=1, limits=draft_limits(limits, TOP_P)),
    ]
    memory = loaded((large, 4), (small, 1))
    room = room_on_gpu(held, limits, TOP_P, memory, num_communicators=1, name="memory of cuda:0")
    assert (options["tp_size"], options["max_seq_len"]) == (4, 8192)
    assert {"policy", "max_num_seqs", "max_num_batched_tokens"}.isdisjoint(options)
    assert 0 < options["top_p"] < 1 and options["temperature"] > 0 and "cache_memory" not in options
    shown = documentation().partition("<!-- memory:begin -->")[2].partition("<!-- memory:end -->")[0]
    assert shown.strip("\n`") == str(room)


def test_blocks_have_pages_beside_those_of_the_table(small: ModelSize) -> None:
    """A page of 16 tokens, 32 KiB each, for the last 15 or 16 tokens of a block of each of 32 sequences; two
    for 17."""
    limits, found = rows(), []
    for num_block_tokens in (0, 15, 16, 17):
        size = dataclasses.replace(small, num_block_tokens=num_block_tokens)
        draft = HeldModel(size=size, tp_size=1, limits=draft_limits(limits, TOP_P))
        found.append(room_on_gpu([draft], limits, TOP_P, loaded((small, 1))).cache_bytes)
    assert [each - found[0] for each in found[1:]] == [pages * 32 * 16 * 32 * 2**10 for pages in (1, 1, 2)]


def test_the_planner_predicts_the_memory_plan_of_the_job(large: ModelSize, small: ModelSize) -> None:
    """The most rows that the planner finds have all their pages in the job; one more has not."""
    plain = Sampling()
    for target, tp_size, num_communicators in ((large, 4, 2), (large, 2, 2), (small, 1, 1)):
        planned = fit(
            target, small, H100, "synchronous", tp_size=tp_size, row_tokens=4096, num_draft_tokens=5
        )
        memory = DeviceMemory(
            total_bytes=H100.memory_bytes,
            free_bytes=H100.memory_bytes - H100.reserved_bytes - target.weight_bytes(tp_size),
        )
        most = planned.target.most_rows
        assert most > 0
        for num_rows, has_room in ((most, True), (most + 1, False)):
            limits = rows(num_rows=num_rows, max_seq_len=4096, max_num_batched_tokens=max(2048, 6 * num_rows))
            held = target_on(target, tp_size, limits, plain)
            room = room_on_gpu([held], limits, plain, memory, num_communicators=num_communicators)
            assert (room.num_pages == limits.num_seq_pages) is has_room, (target.name, num_rows)
            if has_room:
                assert room.needs is not None and room.needs.total == planned.target.reserved_bytes


@pytest.mark.parametrize("total_gib", [16, 22])
def test_a_gpu_without_room_for_a_cache_gives_a_message_that_says_where_the_memory_went(
    middle: ModelSize, total_gib: int
) -> None:
    limits = rows(max_seq_len=32_768)
    total_bytes = total_gib * GIB
    room = room_on_gpu(
        [target_on(middle, 1, limits)], limits, TOP_P, loaded((middle, 1), total_bytes=total_bytes)
    )
    assert room.num_pages < limits.pages_per_seq
    message = refusal(config_of(), limits, room)
    for said in (
        "fewer than one sequence of --max_seq_len 32768",
        f"{total_gib}.00 in all",
        "taken by weights and libraries",
        "reserved (activations",
        "CUDA graphs",
        "logits",
        "--tp_size",
        "--max_num_batched_tokens",
        "--cache_memory",
    ):
        assert said in message, (said, message)
    alone = dataclasses.replace(room, can_share_more=False)
    assert "--tp_size" not in refusal(config_of(), limits, alone)
    num_tokens = room.num_pages * PAGE_SIZE
    assert (f"lower --max_seq_len to {num_tokens}" in message) == (num_tokens > 0) == (total_gib == 22)


def test_sampling_options_decide_what_is_reserved_for_logits() -> None:
    given = ({"temperature": 0, "top_p": 0.5}, {}, {"acceptance": "gumbel"}, {"top_p": 0.9})
    assert [sampling_of(config_of(**each)).bytes_per_logit for each in given] == [12, 12, 32, 24]


def test_an_eagle_draft_keeps_a_state_of_every_token_and_its_target_leaves_three(middle: ModelSize) -> None:
    """For a page: keys and values of one layer, and a state; for a pass: three copies of three states."""
    config = LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=1,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=64,
        architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=32_000,
    )  # fmt: skip
    draft = model_size("eagle", config, 2)
    assert draft.cache_bytes_per_token(1) == 2 * (2 * 8 * 128 + 4096)
    assert draft.num_head == 32_000 * 4096
    limits = rows()
    with_states = dataclasses.replace(limits, num_state_numbers=draft.num_read_numbers)
    plain, larger = (
        room_on_gpu([target_on(middle, 1, each)], each, TOP_P, loaded((middle, 1)))
        for each in (limits, with_states)
    )
    assert plain.needs is not None and larger.needs is not None
    assert larger.needs.total - plain.needs.total == 3 * 2048 * 3 * 4096 * 2
