"""Compiled passes: transformers' numbers, the same bits in every batch, and no need of a compiler."""

import copy
import itertools
import logging
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

from specdist.kernels import cpu_library
from specdist.models.attention.attention import AttentionRules
from specdist.models.batch.flat import FlatBatch
from specdist.models.cpu.compiled import CompiledPass, UnknownStructureError
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.runner import ModelRunner
from specdist.utils.errors import UserError
from tests.engine.harness import paged_runner
from tests.models.chunks import STEPS, TOLERANCE, GrowingRows, check_rows
from tests.models.families import VOCAB_SIZE, tiny_model

CPU = torch.device("cpu")
TILES = "amx_bf16"
COMPILED = ("llama", "qwen2", "qwen3", "mistral")
# More than fit into the registers or are attended to at once, and over the ends of pages, blocks and windows.
LENGTHS, PAGE_SIZE = (75, 38), 4
# See INPUTS and GROUPS of the code; twelve tokens to a group.
MOST_INPUTS, MANY_TOKENS = 256, 16 * 12 + 20

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, cpu_library.COMPILERS)), reason="this machine has no C compiler"
)


@pytest.fixture(params=["float32", "bfloat16", "bfloat16 without tiles"])
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """In bfloat16 with the processor's tiles, if it has any, and without."""
    if not request.param.endswith("tiles"):
        yield getattr(torch, request.param)
        return
    if not cpu_library.has_instruction(TILES):
        pytest.skip("this processor has no tiles")
    cpu_library.library().use_tiles(False)
    yield torch.bfloat16
    cpu_library.library().use_tiles(True)


@needs_compiler
@pytest.mark.parametrize("family", COMPILED)
def test_ragged_chunks_match_plain_forwards(family: str) -> None:
    """With biases that are not zero, and the cache full of NaN where nobody has written yet."""
    plain = tiny_model(family)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.uniform_(0.5, 1.5)
    runner = paged_runner(plain)
    assert runner.compiled is not None
    check_rows(plain, runner)


@needs_compiler
def test_bfloat16_is_nearer_to_exact_numbers_than_transformers() -> None:
    """Weights, inputs of products, keys and values are rounded, the rest is not."""
    exact = tiny_model("qwen3").bfloat16().float()
    plain = copy.deepcopy(exact).bfloat16()
    own = theirs = 0.0
    # What GrowingRows expects is what transformers computes: once exactly, once rounded.
    passes = (
        GrowingRows(model, STEPS, page_size=PAGE_SIZE).run(paged_runner(plain)) for model in (exact, plain)
    )
    for (found, expected), (_, transformers) in zip(*passes, strict=True):
        own += float((found - expected).square().sum())
        theirs += float((transformers - expected).square().sum())
    assert 0 < own < theirs


def logits_of(runner: ModelRunner, rows: list[np.ndarray], cuts: list[list[int]]) -> list[torch.Tensor]:
    """Each row's logits, when pass number i runs it from ``cuts[row][i]`` to ``cuts[row][i + 1]``."""
    width = -(-max(LENGTHS) // PAGE_SIZE)
    runner.pages.pages[:] = np.random.default_rng(1).permutation(width * 2).reshape(2, width)
    parts: list[list[torch.Tensor]] = [[] for _ in rows]
    for step in range(len(cuts[0]) - 1):
        spans = [np.arange(own[step], own[step + 1]) for own in cuts]
        batch = FlatBatch(
            np.concatenate([row[span] for row, span in zip(rows, spans, strict=True)]),
            np.repeat(np.arange(len(rows)), [len(span) for span in spans]),
            np.concatenate(spans),
        )
        logits = runner.forward(batch, np.arange(len(batch)))
        for own_parts, part in zip(parts, logits.split([len(span) for span in spans]), strict=True):
            own_parts.append(part)
    return [torch.cat(own_parts) for own_parts in parts]


@needs_compiler
@pytest.mark.parametrize("num_threads", [1, 2])
def test_logits_are_the_same_bits_in_any_batch(dtype: torch.dtype, num_threads: int) -> None:
    """Alone, a token at a time; as a prompt at once; in blocks beside another row; on one thread and two."""
    generator = np.random.default_rng(0)
    rows = [generator.integers(2, VOCAB_SIZE, size=length) for length in LENGTHS]
    runner = paged_runner(tiny_model("mistral").to(dtype))
    assert runner.compiled is not None
    runner.allocate(num_pages=64, page_size=PAGE_SIZE, num_slots=2, max_seq_len=max(LENGTHS))
    before = torch.get_num_threads()
    try:
        [alone] = logits_of(runner, rows[:1], [list(range(LENGTHS[0] + 1))])
        torch.set_num_threads(num_threads)
        [at_once] = logits_of(runner, rows[:1], [[0, LENGTHS[0]]])
        [blocks, _] = logits_of(runner, rows, [[0, 1, 9, 22, 49, 75], [0, 30, 31, 31, 33, 38]])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(at_once, alone)
    assert torch.equal(blocks, alone)


@needs_compiler
def test_more_inputs_and_tokens_than_a_cache_keeps(dtype: torch.dtype) -> None:
    """Products whose inputs are taken in several parts, the last one shorter, and more tokens than share a
    look at the weights: transformers' numbers, and the bits of single tokens. The check at the start has
    neither."""
    plain = tiny_model("llama", intermediate_size=2 * MOST_INPUTS + 38, max_position_embeddings=256).to(dtype)
    [row] = np.random.default_rng(0).integers(2, VOCAB_SIZE, size=(1, MANY_TOKENS))
    expected = copy.deepcopy(plain).float()(torch.from_numpy(row)[None]).logits[0]
    runner = paged_runner(plain)
    assert runner.compiled is not None
    runner.allocate(num_pages=-(-MANY_TOKENS // 16), page_size=16, num_slots=1, max_seq_len=MANY_TOKENS)
    runner.pages.pages[:] = np.arange(runner.pages.pages.size)
    found = []
    for bounds in ([0, MANY_TOKENS], [0, MANY_TOKENS - 3, MANY_TOKENS - 2, MANY_TOKENS]):
        for begin, end in itertools.pairwise(bounds):
            positions = np.arange(begin, end)
            batch = FlatBatch(row[begin:end], 0 * positions, positions)
            logits = runner.forward(batch, np.arange(end - begin))
        found.append(logits[-2:])
    assert torch.equal(found[0], found[1])
    tolerance = TOLERANCE if dtype == torch.float32 else 0.1
    torch.testing.assert_close(found[0].float(), expected[-2:], atol=tolerance, rtol=tolerance)


def test_without_a_compiler_torch_runs_the_layers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    cpu_library.library.cache_clear()
    plain = tiny_model("llama")
    with caplog.at_level(logging.INFO):
        runner = paged_runner(plain)
    assert runner.compiled is None
    assert [message.split(";")[0] for message in caplog.messages] == ["layers of llama: transformers"]
    check_rows(plain, runner)
    cpu_library.library.cache_clear()


@needs_compiler
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "youtu"])
def test_other_families_keep_transformers_layers(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model, is_known = paged_runner(tiny_model(family)).model, family in COMPILED
    with caplog.at_level(logging.INFO):
        assert (ModelRunner(model, CPU).compiled is not None) == is_known
    whose = "specdist, compiled" if is_known else "transformers"
    # Of latents there is a line before it.
    message = caplog.messages[-1]
    assert message.startswith(f"layers of {family}: {whose}")
    assert ModelRunner(model, CPU, model_impl="transformers").compiled is None
    if not is_known:
        with pytest.raises(UserError, match=rf"--model_impl specdist: .*\({family}\).*use --model_impl auto"):
            ModelRunner(model, CPU, model_impl="specdist")


def test_where_nothing_is_compiled_it_is_not_promised() -> None:
    """As on a GPU."""
    model = paged_runner(tiny_model("llama")).model
    with pytest.raises(UserError, match=r"--model_impl specdist: .*runs on a CPU alone\): use --model_impl"):
        ModelRunner(model, CPU, Acceleration(), model_impl="specdist")


class HalvedLinear(nn.Linear):
    """A layer that is linear, and not plainly so."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(input)


class HalvedAttention(LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(*args, **kwargs)
        return 0.5 * output, weights


def replace_linear(model: PreTrainedModel) -> None:
    model.model.layers[2].mlp.up_proj.__class__ = HalvedLinear


def add_part(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.register_module("gate", nn.Linear(1, 1))


def bias_one(model: PreTrainedModel) -> None:
    attention = model.model.layers[0].self_attn
    attention.k_proj.bias = nn.Parameter(torch.ones(attention.k_proj.out_features))


class ShardedLinear(nn.Module):
    """Without the attributes of torch's, as DeepSpeed's layers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, self.weight, self.bias)


@needs_compiler
def test_why_a_sharded_layer_is_not_compiled_is_said_plainly(caplog: pytest.LogCaptureFixture) -> None:
    model = paged_runner(tiny_model("llama")).model
    model.model.layers[0].self_attn.q_proj = ShardedLinear(model.model.layers[0].self_attn.q_proj)
    with caplog.at_level(logging.INFO):
        assert ModelRunner(model, CPU).compiled is None
    assert "not plainly linear, such as a sharded one" in caplog.text and "Error" not in caplog.text


@needs_compiler
def test_a_model_that_computes_something_else_keeps_its_layers() -> None:
    """The same parts with another factor, as in Granite: only the numbers can tell."""
    plain = tiny_model("llama")
    plain.model.layers[1].self_attn.__class__ = HalvedAttention
    runner = paged_runner(plain)
    assert runner.compiled is None
    check_rows(plain, runner)


@needs_compiler
@pytest.mark.parametrize("change", [replace_linear, add_part, bias_one])
def test_structures_that_are_not_known(change: Callable[[PreTrainedModel], None]) -> None:
    """They are refused before anything is run."""
    model = paged_runner(tiny_model("llama")).model
    rules = AttentionRules(scale=None, window=None, softcap=None)
    CompiledPass(model, dict.fromkeys(range(3), rules))
    change(model)
    with pytest.raises(UnknownStructureError):
        CompiledPass(model, dict.fromkeys(range(3), rules))


@needs_compiler
def test_rules_that_compiled_code_lacks() -> None:
    model = paged_runner(tiny_model("llama")).model
    rules = AttentionRules(scale=None, window=None, softcap=None, has_sinks=True)
    with pytest.raises(UnknownStructureError, match="a soft cap, or attention sinks"):
        CompiledPass(model, dict.fromkeys(range(3), rules))
