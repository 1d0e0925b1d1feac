"""Whether a model may run as compiled code: its structure, and logits that are transformers' to rounding.

Families differ in what no name tells: a norm's offset, a factor of the embedding or the residuals, the order
of a rotation's halves. So the logits decide.

T flat tokens, H heads, G key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.attention.attention import AttentionRules, LayerAttention, attend_segments
from specdist.models.cache.key_value import KeyValueCache
from specdist.models.cpu.compiled import CompiledPass
from specdist.models.loading.dry_run import LayerShapes
from specdist.models.passes.flat import FlatBatch, causal_bias
from specdist.utils.errors import UserError, first_line

NUM_TOKENS, SEED = 24, 0
# Largest difference over the largest logit: sums in another order, and in half precision other roundings of
# every layer. A factor or a norm that is left out changes logits by as much as they are.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
MAX_REASON_CHARACTERS = 160
# Tokens of two sequences in each pass over the cache: more than fit into the registers at once, and fewer.
CHECK_BLOCKS, CHECK_PAGE_SIZE = ((14, 0), (1, 9), (6, 1), (1, 6), (2, 8)), 4

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


def choose_pass(
    model: PreTrainedModel,
    shapes: LayerShapes,
    run_transformers: RunTokens,
    may_compile: bool,
    is_wanted: bool,
) -> CompiledPass | None:
    """The compiled pass, if it gives transformers' logits.

    Raises :class:`UserError` if it does not, and ``is_wanted``.
    """
    family, found, what = model.config.model_type, None, "compiled code runs on a CPU alone"
    if may_compile:
        found, what = _checked_pass(model, shapes, run_transformers)
    if found is None and is_wanted:
        raise UserError(
            f"--model_impl specdist: {model.name_or_path} ({family}) cannot run without "
            f"transformers' layers ({what}): use --model_impl auto"
        )
    whose = "transformers" if found is None else "specdist, compiled"
    logger.info("layers of %s by %s: %s", family, whose, what)
    return found


def _checked_pass(
    model: PreTrainedModel, shapes: LayerShapes, run_transformers: RunTokens
) -> tuple[CompiledPass | None, str]:
    """The model's compiled pass and what was found; None if it cannot be used, and why."""
    try:
        found = CompiledPass(model, shapes.rules)
        difference = _difference(model, found, shapes.shapes, run_transformers)
    except Exception as error:  # structures and compilers fail in more ways than can be foreseen
        return None, textwrap.shorten(first_line(error), MAX_REASON_CHARACTERS)
    # Not "difference > tolerance": NaN is also wrong.
    if not difference <= TOLERANCES.get(model.dtype, 0.0):
        return None, f"its logits differ by {difference:.2g} of the largest"
    return found, f"the logits differ by {difference:.1g} of the largest"


@torch.inference_mode()
def _difference(
    model: PreTrainedModel,
    found: CompiledPass,
    shapes: dict[int, tuple[int, int]],
    run_transformers: RunTokens,
) -> float:
    """Two sequences of the same tokens, over scattered pages: prompts, blocks and single tokens, mixed."""
    config = model.config.get_text_config()
    num_tokens = min(NUM_TOKENS, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(SEED)
    token_ids_T = torch.randint(config.vocab_size, (num_tokens,), generator=generator)
    tokens_T = torch.arange(num_tokens)
    expected_TV = run_transformers(token_ids_T, tokens_T, tokens_T, DenseAttention()).float()
    num_pages = -(-num_tokens // CHECK_PAGE_SIZE)
    cache = KeyValueCache(
        shapes, num_pages=2 * num_pages, page_size=CHECK_PAGE_SIZE, dtype=model.dtype, device=model.device
    )
    found.bind(cache)
    page_table = np.arange(2 * num_pages, dtype=np.int32)[::-1].reshape(num_pages, 2).T.copy()
    largest, begins = 0.0, np.zeros(2, np.int64)
    for sizes in CHECK_BLOCKS:
        ends = np.minimum(begins + sizes, num_tokens)
        positions_T = np.concatenate([np.arange(*ends_of) for ends_of in zip(begins, ends, strict=True)])
        if len(positions_T):
            batch = FlatBatch(token_ids_T[positions_T], np.repeat(np.arange(2), ends - begins), positions_T)
            found_TV, _ = found(batch, np.arange(len(batch)), page_table)
            largest = max(largest, float((found_TV.float() - expected_TV[positions_T]).abs().max()))
        begins = ends
    return largest / float(expected_TV.abs().max())
