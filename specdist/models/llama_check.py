"""Whether a model may run in few operations: its structure, and logits that are transformers' to rounding.

Families differ in what no name tells: a norm's offset, a factor of the embedding or the residuals, the order
of a rotation's halves. So the logits decide.

T flat tokens, H heads, G key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.cache.key_value import KeyValueCache
from specdist.models.attention import AttentionRules, LayerAttention, attend_segments, attending
from specdist.models.compiled import CompiledPass
from specdist.models.dry_run import LayerShapes
from specdist.models.flat import FlatBatch, causal_bias
from specdist.models.llama import LlamaPass
from specdist.utils.errors import UserError, first_line

# Two texts of the same tokens would give the same logits at equal distances: the positions have gaps.
NUM_TOKENS, POSITIONS_PER_TOKEN = 24, 7
SEED = 0
# Largest difference over the largest logit: sums in another order, and in half precision other roundings of
# every layer. A factor or a norm that is left out changes logits by as much as they are.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
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
) -> LlamaPass | CompiledPass | None:
    """The fastest pass that gives transformers' logits; None if none does.

    Raises :class:`UserError` then, if one ``is_wanted``.
    """
    family, rules = model.config.model_type, shapes.rules
    if may_compile:
        compiled, what = checked_compiled_pass(model, shapes.shapes, rules, run_transformers)
        if compiled is not None:
            logger.info("layers of %s by specdist, compiled: %s", family, what)
            return compiled
        logger.debug("layers of %s are not compiled: %s", family, what)
    found, what = checked_pass(model, rules, run_transformers)
    if found is None and is_wanted:
        raise UserError(
            f"--model_impl specdist: {model.name_or_path} ({family}) cannot run without "
            f"transformers' layers ({what}): use --model_impl auto"
        )
    logger.info("layers of %s by %s: %s", family, "transformers" if found is None else "specdist", what)
    return found


def checked_pass(
    model: PreTrainedModel, rules: Mapping[int, AttentionRules], run_transformers: RunTokens
) -> tuple[LlamaPass | None, str]:
    """The model's pass in few operations and what was found; None if it cannot be used, and why."""
    try:
        found = LlamaPass(model, rules)
        difference = _difference(model, found, run_transformers)
    except Exception as error:  # structures differ in more ways than can be foreseen
        return None, textwrap.shorten(first_line(error), MAX_REASON_CHARACTERS)
    return _verdict(found, difference, model.dtype)


def checked_compiled_pass(
    model: PreTrainedModel,
    shapes: dict[int, tuple[int, int]],
    rules: Mapping[int, AttentionRules],
    run_transformers: RunTokens,
) -> tuple[CompiledPass | None, str]:
    """The same for the model's compiled pass.

    Args:
        shapes: key/value heads and head width of every layer.
    """
    try:
        found = CompiledPass(model, rules)
        difference = _compiled_difference(model, found, shapes, run_transformers)
    except Exception as error:  # compilers, too, fail in more ways than can be foreseen
        return None, textwrap.shorten(first_line(error), MAX_REASON_CHARACTERS)
    return _verdict(found, difference, model.dtype)


Pass = TypeVar("Pass", LlamaPass, CompiledPass)


def _verdict(found: Pass, difference: float, dtype: torch.dtype) -> tuple[Pass | None, str]:
    # Not "difference > tolerance": NaN is also wrong.
    if not difference <= TOLERANCES.get(dtype, 0.0):
        return None, f"its logits differ by {difference:.2g} of the largest"
    return found, f"the logits differ by {difference:.1g} of the largest"


@torch.inference_mode()
def _compiled_difference(
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


@torch.inference_mode()
def _difference(model: PreTrainedModel, found: LlamaPass, run_transformers: RunTokens) -> float:
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(SEED)
    num_tokens = min(NUM_TOKENS, config.max_position_embeddings)
    stride = max(1, min(POSITIONS_PER_TOKEN, config.max_position_embeddings // num_tokens))
    token_ids_T = torch.randint(config.vocab_size, (num_tokens,), generator=generator).to(model.device)
    positions_T = stride * torch.arange(num_tokens, device=model.device)
    tokens_T = torch.arange(num_tokens, device=model.device)
    with attending(DenseAttention(), found.rules):
        expected_TV, found_TV = (
            run(token_ids_T, positions_T, tokens_T, DenseAttention()).float()
            for run in (run_transformers, found)
        )
    return float((found_TV - expected_TV).abs().max() / expected_TV.abs().max())
