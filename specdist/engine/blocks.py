"""Blocks and prompt chunks as the flat batch of a pass. No tensors."""

from __future__ import annotations

import numpy as np

from specdist.engine.proposals import Block
from specdist.engine.scheduler import Chunk
from specdist.models.flat import FlatBatch
from specdist.utils.ranges import arange_segments


def flat_batch(blocks: list[Block], chunks: list[Chunk]) -> FlatBatch:
    """The tokens of blocks, each from its sequence's last committed token on, and of prompt chunks."""
    # Sequence, first position, and tokens of each.
    parts = [
        (block.sequence, len(block.sequence.token_ids) - 1, [block.next_token_id, *block.candidate_ids])
        for block in blocks
    ] + [(chunk.sequence, chunk.begin, chunk.sequence.token_ids[chunk.begin : chunk.end]) for chunk in chunks]
    lengths = np.array([len(token_ids) for *_, token_ids in parts], np.int64)
    begins = np.array([begin for _, begin, _ in parts], np.int64)
    return FlatBatch(
        np.array([token for *_, token_ids in parts for token in token_ids], np.int64),
        np.repeat(np.array([sequence.slot for sequence, *_ in parts], np.int64), lengths),
        np.repeat(begins, lengths) + arange_segments(lengths),
    )
