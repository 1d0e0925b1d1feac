"""Sizes from a configuration against models that were built from it, whole and sharded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specdist.lab.plan.shapes import SHAPES
from specdist.models.cache.prefix_states import Rollback
from specdist.models.files.checkpoint import UNSHARDABLE_FAMILIES
from specdist.models.passes.acceleration import Acceleration
from specdist.models.sizes.sizes import ModelSize, model_size
from tests.engine.harness import PAGE_SIZE, page_bytes, paged_runner
from tests.models.all_families import tiny_config
from tests.models.families import FAMILIES, tiny_model
from tests.ranks import run_ranks

WHOLE_STATES = ("falcon_h1",)
STATE_FAMILIES = ("qwen3_5_text", "lfm2", "kimi_linear", "nemotron_h", "jamba", *WHOLE_STATES)
FLOAT_BYTES = 4


def size_of(family: str, **overrides: object) -> ModelSize:
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **overrides})
    return model_size(family, config, FLOAT_BYTES)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_cache_are_those_of_the_model(family: str) -> None:
    model, size = tiny_model(family), size_of(family)
    num_parameters = sum(weight.numel() for weight in model.parameters())
    assert size.num_parameters == num_parameters
    assert size.weight_bytes(1) == num_parameters * FLOAT_BYTES
    for has_float8_cache in (False, True):
        runner = paged_runner(model, Acceleration(has_float8_cache=has_float8_cache))
        own = dataclasses.replace(size, has_float8_cache=has_float8_cache)
        assert own.cache_bytes_per_token(1) * PAGE_SIZE == page_bytes(runner, PAGE_SIZE)


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_states_and_keys_are_those_that_a_runner_holds(family: str) -> None:
    """Layers of states keep no keys; states take as much of every sequence."""
    config, rollback = tiny_config(family), Rollback(6)
    with torch.device("meta"):
        size = model_size(family, config, FLOAT_BYTES)
    runner = paged_runner(AutoModelForCausalLM.from_config(config).float())
    runner.allocate(num_pages=8, page_size=PAGE_SIZE, num_slots=3, max_seq_len=8, rollback=rollback)
    states = runner.cache.states
    assert states is not None
    held = [*map(states.rings, states.rows), *states.states.values()]
    assert 3 * size.state_bytes(1, rollback) == sum(each.nbytes for each in held) > 0
    assert size.cache_bytes_per_token(1) * PAGE_SIZE == page_bytes(runner, PAGE_SIZE)
    num_ranks = 1 if family in WHOLE_STATES else 2
    assert num_ranks * size.states.state_bytes(2) == size.states.state_bytes(1)
    if family in ("qwen3_5_text", "kimi_linear"):  # four heads of keys, and sixteen
        assert size.tp_sizes(8)[-1] == (4 if family == "qwen3_5_text" else 8)


@pytest.mark.ranks
def test_a_ranks_weights_are_those_that_it_holds(tmp_path: Path) -> None:
    """Among them tied and untied heads, and biases of every kind.

    DeepSpeed hands out feed-forward columns by 64, so that ranks hold equally much of these widths only.
    """
    folders = []
    for family in ("llama", "gemma2", "gpt_neox", "phi"):
        tiny_model(family, intermediate_size=128).save_pretrained(tmp_path / family)
        folders.append(str(tmp_path / family))
    # Cut as plans say, beside layers that are whole on every rank.
    for family in ("phi3", "olmo2", "minicpm3", "gemma4_text"):
        config = tiny_config(family)
        config.intermediate_size = 128
        folders.append(str(tmp_path / family))
        AutoModelForCausalLM.from_config(config).save_pretrained(folders[-1])
    # One key/value head, which both ranks have.
    folders.append(str(tmp_path / "phi3-shared"))
    tiny_model("phi3", intermediate_size=128, num_key_value_heads=1).save_pretrained(folders[-1])
    run_ranks("tests.models.sharded_sizes", 2, *folders)


def test_a_pass_reads_all_but_the_embedding() -> None:
    untied, tied = size_of("llama"), size_of("gemma")
    assert untied.streamed_bytes(1) == (untied.num_parameters - untied.num_embedding) * FLOAT_BYTES
    # A tied head is the embedding itself, read as a matrix.
    assert tied.streamed_bytes(1) == tied.num_parameters * FLOAT_BYTES
    assert untied.flops_per_token(2) == untied.flops_per_token(1) / 2


def test_a_window_bounds_what_is_read_and_not_what_is_kept() -> None:
    size = size_of("gemma2")
    assert [layer.window for layer in size.layers] == [16, None, 16]
    per_layer = size.cache_bytes_per_token(1) / 3
    assert size.cache_read_bytes(1, 100) == per_layer * (16 + 100 + 16)
    assert size.cache_read_bytes(1, 10) == per_layer * 30
    assert [layer.window for layer in size_of("gpt_neo").layers] == [16, None, 16]
    assert {layer.window for layer in size_of("qwen2").layers} == {None}
    assert size.attention_flops(1, 10) == 4 * 4 * 16 * 30


def test_ranks_divide_heads_and_key_value_heads() -> None:
    # Of 4 heads, and 2 of keys and of values, which 4 ranks share.
    assert size_of("llama").tp_sizes(8) == [1, 2, 4]
    # DeepSpeed does not shard them; and where the draft takes the only GPU, none is left.
    for family in {*UNSHARDABLE_FAMILIES} & {*FAMILIES}:
        assert (size_of(family).tp_sizes(8), size_of(family).tp_sizes(0)) == ([1], [])
    config = SHAPES["70b"].llama_config(torch.bfloat16)
    large = model_size("70b", config, 2)
    assert large.tp_sizes(16) == [1, 2, 4, 8, 16]
    # 80 layers, 8 heads of 128, keys and values of 2 bytes.
    assert large.cache_bytes_per_token(1) == 80 * 8 * 128 * 2 * 2
    assert large.cache_bytes_per_token(4) * 4 == large.cache_bytes_per_token(1)
    assert large.cache_bytes_per_token(16) * 8 == large.cache_bytes_per_token(1)
