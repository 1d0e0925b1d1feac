"""Small inputs and results that the data tests share."""

from __future__ import annotations

import random
from typing import Any

from specdist.data.stats.rows import RowResult

STRANGE_TEXT = [
    "",
    "a\nb",
    "\u2028\r\0",
    "é中😀",
    "\ud83d",
    "\udc00\ud83d",
    "\ud83d\ude00",
    '"\\u0041"',
    "\x7f\x1f",
]


def row_result(row_id: int = 0, sample_index: int = 0, **changes: Any) -> RowResult:
    values: dict[str, Any] = {
        "row_id": row_id,
        "sample_index": sample_index,
        "prompt": f"prompt {row_id}",
        "completion": f"answer {row_id}.{sample_index}",
        "completion_ids": (row_id, sample_index, 7),
        "finish_reason": "stop",
        "error": None,
        "num_prompt_tokens": 2,
        "num_completion_tokens": 3,
        "num_spec_steps": 2,
        "num_draft_tokens": 4,
        "num_accepted_draft_tokens": 1,
    }
    return RowResult(**(values | changes))


def random_text(rng: random.Random) -> str:
    """Any code points, lone surrogates included."""
    return "".join(
        chr(rng.choice([rng.randrange(128), rng.randrange(0x110000)])) for _ in range(rng.randrange(9))
    )
