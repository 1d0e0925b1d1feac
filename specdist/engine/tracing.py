"""Writes down what becomes of every drafted token, row by row. No tensors.

R rows that decode, K candidates of a block.
"""

from __future__ import annotations

import math

import numpy as np

from specdist.data.traces import TracedToken
from specdist.engine.proposals import TracedDrafts
from specdist.engine.sequence import Sequence


def note_next_token(sequence: Sequence, drafts: TracedDrafts, row: int) -> None:
    """Before the next token is committed: if a token was drafted ahead in its place, it has been verified."""
    if not drafts.is_verified_R[row]:
        return
    entropy, probability, top_probability, estimate = drafts.features_4R[:, row].tolist()
    sequence.trace.append(
        TracedToken(
            round=sequence.num_blocks,
            depth=sequence.num_accepted,
            position=sequence.num_completion_tokens,
            token_id=int(drafts.token_ids_R[row]),
            entropy=entropy,
            draft_probability=probability,
            top_probability=top_probability,
            acceptance_probability=float(drafts.acceptance_R[row]),
            is_verified=True,
            is_accepted=bool(drafts.is_hit_R[row]),
            head_probability=_known(estimate),
        )
    )


def note_block(
    sequence: Sequence,
    candidate_ids: list[int],
    features_4K: np.ndarray,
    *,
    acceptance_K: np.ndarray | None,
    num_trusted: int,
    num_verified: int,
    num_accepted: int,
) -> None:
    """After the next token, before the accepted candidates are committed. ``acceptance`` is None for a block
    that no target pass has seen. Of the ``num_verified`` first, those that are trusted were only looked
    at."""
    begin = sequence.num_completion_tokens
    features = zip(candidate_ids, *features_4K.tolist(), strict=True)
    for depth, (token_id, entropy, probability, top_probability, estimate) in enumerate(features):
        sequence.trace.append(
            TracedToken(
                round=sequence.num_blocks,
                depth=depth,
                position=begin + depth,
                token_id=token_id,
                entropy=entropy,
                draft_probability=probability,
                top_probability=top_probability,
                acceptance_probability=None if acceptance_K is None else float(acceptance_K[depth]),
                is_verified=num_trusted <= depth < num_verified,
                is_accepted=depth < num_accepted,
                head_probability=_known(estimate),
            )
        )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
