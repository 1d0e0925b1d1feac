"""The flat forward over the paged cache against one plain transformers forward per row."""

import copy
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from specdist.models.batch.flat import FlatBatch
from specdist.models.passes.acceleration import Acceleration
from tests.engine.harness import paged_runner
from tests.models.chunks import MIXED, GrowingRows, check_rows, give_pages
from tests.models.families import CUT, FAMILIES, tiny_model
from tests.models.peft_adapters import write_adapter
from tests.ranks import run_ranks

SHARDED = ("llama", "qwen3", "gemma2", "gpt_neox", "phi", "granite_swa", "youtu", "qwen3_5_text", *CUT)


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_chunks_match_plain_forwards(family: str) -> None:
    plain = tiny_model(family)
    # Compiled passes: test_compiled.py.
    check_rows(plain, paged_runner(plain, Acceleration()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_scores_beyond_half_precision(dtype: torch.dtype) -> None:
    """GPT-Neo does not scale its scores; transformers keeps them in float32, where float16 would overflow."""
    plain = tiny_model("gpt_neo", initializer_range=0.05)
    with torch.no_grad():
        for block in plain.transformer.h:
            # All scores alike, so that rounding decides nothing: infinities would leave no number.
            block.ln_1.weight.zero_()
            block.ln_1.bias[0] = 1
            for projection in (block.attn.attention.q_proj, block.attn.attention.k_proj):
                projection.weight[:, 0] = torch.finfo(torch.float16).max ** 0.5
    half = copy.deepcopy(plain).to(dtype)
    for found, wanted in GrowingRows(half, MIXED, page_size=4).run(paged_runner(half)):
        assert bool(wanted.isfinite().all())
        # Eight bits of mantissa through three layers; the logits are of order 1.
        torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.05)


class WithoutIndex(LlamaForCausalLM):
    """Ignores which logits are wanted, as some models of texts and sounds do."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=False)


def test_a_model_that_gives_all_logits_is_asked_for_the_wanted_ones() -> None:
    plain = tiny_model("llama")
    model = WithoutIndex(plain.config)
    model.load_state_dict(plain.state_dict())
    rows = np.arange(2, 42)[None]
    runner = paged_runner(model, Acceleration())
    give_pages(runner, rows, page_size=4)
    asked = np.array([7, 19])
    logits = runner.forward(FlatBatch(rows[0, :20], np.zeros(20, np.int64), np.arange(20)), asked)
    with torch.inference_mode():
        expected = plain(torch.from_numpy(rows)).logits[0, asked]
    torch.testing.assert_close(logits, expected, atol=5e-5, rtol=5e-5)


@pytest.mark.ranks
def test_slices_of_two_ranks_match_plain_forwards(tmp_path: Path) -> None:
    """One family of each kind of cut, and a tied head, which is another matrix to cut."""
    folders = []
    for family, is_tied in (*((family, False) for family in SHARDED), ("gemma2", True)):
        model = tiny_model(family, tie_word_embeddings=is_tied)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):  # they start at zero, where a wrong cut shows nothing
                    parameter.normal_()
        folder = tmp_path / f"{family}{' tied' * is_tied}"
        model.save_pretrained(folder, max_shard_size="60KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        folders.append(str(folder))
    if importlib.util.find_spec("peft"):
        # Cut by rows and by columns, and joined projections; the head is cut by this package.
        for family, modules in {
            "llama": ["q_proj", "o_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"],
            "phi3": ["qkv_proj", "gate_up_proj", "down_proj"],
        }.items():
            model = tiny_model(family, tie_word_embeddings=False)
            adapter = write_adapter(model, tmp_path / f"{family}-adapter", target_modules=modules)
            model.save_pretrained(tmp_path / f"{family}-adapted")
            folders.append(f"{tmp_path / family}-adapted={adapter}")
    run_ranks("tests.models.sharded_parity", 3, *folders)


@pytest.mark.ranks
def test_slices_of_four_ranks_match_plain_forwards(tmp_path: Path) -> None:
    """One family of each kind of cut; two ranks have the same key/value head."""
    folders = [str(tmp_path / family) for family in ("llama", *CUT)]
    for family, folder in zip(("llama", *CUT), folders, strict=True):
        tiny_model(family).save_pretrained(folder)
    run_ranks("tests.models.sharded_parity", 5, "--plain", *folders)
