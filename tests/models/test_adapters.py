"""Switching models between transformers and the paged cache; GPT-Neo's scores in half precision."""

import copy

import numpy as np
import pytest
import torch

from specdist.models.families.adapters import use_paged_attention, use_transformers_attention
from specdist.models.passes.runner import ModelRunner
from tests.engine.harness import paged_runner
from tests.models.chunks import MIXED, GrowingRows, check_rows
from tests.models.families import VOCAB_SIZE, tiny_model

NUM_SWITCHES = 3


@pytest.mark.parametrize("family", ["gpt_neo", "gpt2", "llama"])
def test_the_same_weights_run_in_both_by_turns(family: str) -> None:
    """As in a benchmark. The rows of transformers' batch are padded, which only its own masks exclude."""
    plain = tiny_model(family)
    model = copy.deepcopy(plain)
    token_ids = torch.from_numpy(np.random.default_rng(0).integers(2, VOCAB_SIZE, size=(2, 24)))
    is_real = torch.ones_like(token_ids)
    is_real[0, :9] = 0
    options = {"attention_mask": is_real, "do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    with torch.inference_mode():
        expected = plain.generate(token_ids, **options)
    for _ in range(NUM_SWITCHES):
        use_paged_attention(model)
        use_paged_attention(model)  # once more changes nothing
        check_rows(plain, ModelRunner(model, torch.device("cpu")))
        use_transformers_attention(model)
        with torch.inference_mode():
            assert torch.equal(model.generate(token_ids, **options), expected)


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
