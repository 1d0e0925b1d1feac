"""The per-token acceptance trace: every candidate and how it ended, sequence by sequence. No tensors.

K candidates of a block.
"""

from __future__ import annotations

import numpy as np

from specdist.data.stats.traces import TracedToken
from specdist.engine.rounds.verify import Block


def record_block(
    block: Block, acceptance_K: np.ndarray | None, *, num_verified: int, num_accepted: int
) -> None:
    """Record a block's candidates, if the run is traced. To be called after the next token and before the
    accepted candidates are committed.

    Args:
        acceptance_K: acceptance probabilities; None for a block that was not in a target pass.
        num_verified: leading candidates that count as verified, except the trusted ones.
    """
    if block.features_3K is None:
        return
    begin = block.sequence.num_completion_tokens
    features = zip(block.candidate_ids, *block.features_3K.tolist(), strict=True)
    for depth, (token_id, entropy, probability, top_probability) in enumerate(features):
        block.sequence.trace.append(
            TracedToken(
                round=block.sequence.num_blocks,
                depth=depth,
                position=begin + depth,
                token_id=token_id,
                entropy=entropy,
                draft_probability=probability,
                top_probability=top_probability,
                acceptance_probability=None if acceptance_K is None else float(acceptance_K[depth]),
                is_verified=block.num_trusted <= depth < num_verified,
                is_accepted=depth < num_accepted,
            )
        )
