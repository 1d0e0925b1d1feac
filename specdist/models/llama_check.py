"""Whether a model may run in few operations: its structure, and logits that are transformers' to rounding.

Families differ in what no name tells: a norm's offset, a factor of the embedding or the residuals, the order
of a rotation's halves. So the logits decide.

T flat tokens, H heads, G key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.attention import AttentionRules, LayerAttention, attend_segments
from specdist.models.flat import causal_bias
from specdist.models.llama import LlamaPass

# Two texts of the same tokens would give the same logits at equal distances: the positions have gaps.
NUM_TOKENS, POSITIONS_PER_TOKEN = 24, 7
SEED = 0
# Largest difference over the largest logit: sums in another order, and in half precision other roundings of
# every layer. A factor or a norm that is left out changes logits by as much as they are.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
MAX_REASON_CHARACTERS = 160

RunTokens = Callable[[Tensor, Tensor, Tensor, LayerAttention], Tensor]

logger = logging.getLogger(__name__)


class DenseAttention:
    """Causal attention of all tokens of a pass as one text, without a cache."""

    def attend(
        self, layer: int, queries_THD: Tensor, keys_TGD: Tensor, values_TGD: Tensor, rules: AttentionRules
    ) -> Tensor:
        del layer
        num_tokens, num_heads, _ = queries_THD.shape
        bias = causal_bias(
            torch.arange(num_tokens, device=queries_THD.device)[None],
            num_tokens,
            window=rules.window,
            num_repeats=num_heads // keys_TGD.shape[1],
            dtype=queries_THD.dtype,
        )
        keys_1GTD, values_1GTD = (heads[None].transpose(1, 2) for heads in (keys_TGD, values_TGD))
        return attend_segments(queries_THD, keys_1GTD, values_1GTD, bias, rules)


def checked_pass(
    model: PreTrainedModel, rules: Mapping[int, AttentionRules], run_transformers: RunTokens
) -> tuple[LlamaPass | None, str]:
    """The model's pass in few operations and what was found; None if it cannot be used, and why."""
    try:
        found = LlamaPass(model, rules)
        difference = _difference(model, found, run_transformers)
    except Exception as error:  # structures differ in more ways than can be foreseen
        first_line = (str(error) or repr(error)).splitlines()[0]
        return None, textwrap.shorten(first_line, MAX_REASON_CHARACTERS)
    # Not "difference > tolerance": NaN is also wrong.
    if not difference <= TOLERANCES.get(model.dtype, 0.0):
        return None, f"its logits differ by {difference:.2g} of the largest"
    return found, f"the logits differ by {difference:.1g} of the largest"


@torch.inference_mode()
def _difference(model: PreTrainedModel, found: LlamaPass, run_transformers: RunTokens) -> float:
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(SEED)
    num_tokens = min(NUM_TOKENS, config.max_position_embeddings)
    stride = max(1, min(POSITIONS_PER_TOKEN, config.max_position_embeddings // num_tokens))
    token_ids_T = torch.randint(config.vocab_size, (num_tokens,), generator=generator).to(model.device)
    positions_T = stride * torch.arange(num_tokens, device=model.device)
    tokens_T = torch.arange(num_tokens, device=model.device)
    expected_TV, found_TV = (
        run(token_ids_T, positions_T, tokens_T, DenseAttention()).float() for run in (run_transformers, found)
    )
    return float((found_TV - expected_TV).abs().max() / expected_TV.abs().max())
