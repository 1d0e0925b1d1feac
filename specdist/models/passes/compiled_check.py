"""Whether a model may run as compiled code: its structure, and logits that are transformers' to rounding.

Families differ in what no name tells: a norm's offset, a factor of the embedding or the residuals, the order
of a rotation's halves. So the logits decide.

T flat tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.attention.attention import AttentionCall, LayerAttention
from specdist.models.attention.probe import plain_attention
from specdist.models.batch.flat import FlatBatch, PagedSegments, PassOutputs
from specdist.models.cache.key_value import KeyValueCache, LayerShape
from specdist.models.cpu.compiled import CompiledPass, UnknownStructureError
from specdist.models.families.dry_run import LayerShapes
from specdist.utils.errors import UserError
from specdist.utils.trial import check_difference, first_right, tolerance_of

NUM_TOKENS, SEED = 24, 0
COMPILED = "specdist, compiled"
# Tokens of two sequences in each pass over the cache: more than fit into the registers at once, and fewer.
CHECK_BLOCKS, CHECK_PAGE_SIZE = ((14, 0), (1, 9), (6, 1), (1, 6), (2, 8)), 4

RunTokens = Callable[[Tensor, Tensor, Tensor, LayerAttention], PassOutputs]

logger = logging.getLogger(__name__)


class DenseAttention:
    """Plain causal attention of all tokens of a pass as one text, without a cache."""

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        del layer
        num_tokens = len(call.queries_THD)
        zero, end = torch.tensor([[0], [num_tokens]], dtype=torch.int32)
        segments = PagedSegments(zero[None], end, torch.cat([zero, end]), num_tokens, num_tokens)
        of_page = call._replace(keys=call.keys[None], values=call.values[None])
        return plain_attention(of_page, segments).to(call.queries_THD.dtype)


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

    def make() -> CompiledPass:
        if not may_compile:
            raise UnknownStructureError("compiled code runs on a CPU alone")
        return CompiledPass(model, shapes.rules)

    def check(found: CompiledPass) -> str:
        difference = _difference(model, found, shapes.shapes, run_transformers)
        check_difference("its largest logits differ", difference, tolerance_of("pass", model.dtype))
        return f"the logits differ by {difference:.1g} of the largest"

    family, trial = model.config.model_type, first_right({COMPILED: make}, check)
    if trial.found is None and is_wanted:
        raise UserError(
            f"--model_impl specdist: {model.name_or_path} ({family}) cannot run without "
            f"transformers' layers ({trial.reasons[COMPILED]}): use --model_impl auto"
        )
    trial.report(logger, f"layers of {family}", "transformers", otherwise_level=logging.INFO)
    return trial.found


@torch.inference_mode()
def _difference(
    model: PreTrainedModel,
    found: CompiledPass,
    shapes: dict[int, LayerShape],
    run_transformers: RunTokens,
) -> float:
    """Two sequences of the same tokens, over scattered pages: prompts, blocks and single tokens, mixed."""
    config = model.config.get_text_config()
    num_tokens = min(NUM_TOKENS, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(SEED)
    token_ids_T = torch.randint(config.vocab_size, (num_tokens,), generator=generator)
    tokens_T = torch.arange(num_tokens)
    expected_TV = run_transformers(token_ids_T, tokens_T, tokens_T, DenseAttention()).logits_NV.float()
    num_pages = -(-num_tokens // CHECK_PAGE_SIZE)
    cache = KeyValueCache(
        shapes, num_pages=2 * num_pages, page_size=CHECK_PAGE_SIZE, dtype=model.dtype, device=model.device
    )
    found.bind(cache, None)
    page_table = np.arange(2 * num_pages, dtype=np.int32)[::-1].reshape(num_pages, 2).T.copy()
    largest, begins = 0.0, np.zeros(2, np.int64)
    for sizes in CHECK_BLOCKS:
        ends = np.minimum(begins + sizes, num_tokens)
        positions_T = np.concatenate([np.arange(*ends_of) for ends_of in zip(begins, ends, strict=True)])
        if len(positions_T):
            batch = FlatBatch(token_ids_T[positions_T], np.repeat(np.arange(2), ends - begins), positions_T)
            found_TV, _ = found.run(batch, page_table, np.arange(len(batch)))
            largest = max(largest, float((found_TV.float() - expected_TV[positions_T]).abs().max()))
        begins = ends
    return largest / float(expected_TV.abs().max())
