"""GPT-Neo's scores in half precision."""

import copy

import pytest
import torch

from tests.engine.harness import paged_runner
from tests.models.chunks import MIXED, GrowingRows
from tests.models.families import tiny_model


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
