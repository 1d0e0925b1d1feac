"""Failures of a model's pass that the draft and the target tell each other of."""

from __future__ import annotations

import torch

# What RuntimeErrors say of torch's allocators, and of libraries that allocate themselves.
OUT_OF_MEMORY_TEXTS = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")
DRAFT_NOT_FINITE = (
    "the draft's logits are not finite (NaN or infinite) at some positions: no tokens are drafted there"
)


class DraftOutOfMemory(RuntimeError):
    """The draft ran out of memory, of which no rank of the target knows; it waits for the next request."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch might succeed."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError, DraftOutOfMemory)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)
