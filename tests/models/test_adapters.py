"""Switching models to the paged cache; GPT-Neo's scores in half precision."""

import copy

import pytest
import torch

from specdist.models.families.adapters import use_paged_attention
from specdist.models.passes.runner import ModelRunner
from tests.engine.harness import paged_runner
from tests.models.chunks import MIXED, GrowingRows, check_rows
from tests.models.families import tiny_model

NUM_SWITCHES = 2


@pytest.mark.parametrize("family", ["gpt_neo", "gpt2"])
def test_a_model_that_is_switched_again_runs_as_before(family: str) -> None:
    plain = tiny_model(family)
    model = copy.deepcopy(plain)
    for _ in range(NUM_SWITCHES):
        use_paged_attention(model)
        check_rows(plain, ModelRunner(model, torch.device("cpu")))


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
