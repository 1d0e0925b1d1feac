"""Training examples of heads: the Arrow columns that ``jobs/collect.py`` writes. Imports no torch.

One row per drafted token that was verified. P and Q are the target's and the draft's probability of the
token, after the same prefix and after temperature, top-k and top-p.

M examples, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

PrefixKind = Literal["original", "draft", "target", "mixed"]
PREFIX_KINDS: tuple[PrefixKind, ...] = ("original", "draft", "target", "mixed")
HIDDEN_TYPES = {"float16": pa.float16(), "float32": pa.float32()}
# The columns have equal widths in every row, so that the hidden states can be read without a copy.
COLUMNS = {
    "row_id": pa.int64(),
    "prefix_kind": pa.dictionary(pa.int8(), pa.string()),
    "position": pa.int32(),
    "token_id": pa.int32(),
    "ratio": pa.float32(),
    "acceptance": pa.float32(),
    "entropy": pa.float32(),
    "probability": pa.float32(),
    "top_probability": pa.float32(),
}
FEATURES = ("entropy", "probability", "top_probability")
HIDDEN = "hidden"


@dataclass(frozen=True, kw_only=True)
class ExampleBlock:
    """The draft tokens of a text that become examples.

    Attributes:
        positions_M: of the drafted tokens in their sequence, prompt included, from 0.
        probabilities_M: Q, in the distributions that the tokens were drawn from.
        features_3M: entropy in nats, probability of the token and of the likeliest one, of the distribution
            that the draft drew it from (of the softmax at temperature 1 under greedy).
        hidden_MH: the draft's last hidden states, with the drafted tokens as input or that they were drawn
            from.
    """

    row_id: int
    prefix_kind: PrefixKind
    positions_M: np.ndarray
    token_ids_M: np.ndarray
    probabilities_M: np.ndarray
    features_3M: np.ndarray
    hidden_MH: np.ndarray

    def __len__(self) -> int:
        return len(self.positions_M)


def bytes_per_example(hidden_size: int, hidden_dtype: str) -> int:
    """Size of one row in a file, up to a few bytes per thousand rows."""
    widths = [type_.bit_width for type_ in COLUMNS.values()]
    return (sum(widths) + hidden_size * HIDDEN_TYPES[hidden_dtype].bit_width) // 8


def example_table(
    blocks: Sequence[ExampleBlock],
    target_probabilities: Sequence[np.ndarray],
    *,
    hidden_size: int,
    hidden_dtype: str,
) -> pa.Table:
    """The Arrow table of a shard, in the order of the blocks, each with P of its tokens."""
    kinds = np.repeat(
        np.array([PREFIX_KINDS.index(block.prefix_kind) for block in blocks], np.int8),
        [len(block) for block in blocks],
    )
    drafted_M = _joined([block.probabilities_M for block in blocks], np.float64)
    with np.errstate(divide="ignore"):  # infinite where the target never draws the token
        ratios_M = drafted_M / _joined(target_probabilities, np.float64)
    features_3M = _joined([block.features_3M.T for block in blocks], np.float64, 3).T
    hidden_MH = _joined([block.hidden_MH for block in blocks], np.dtype(hidden_dtype), hidden_size)
    values = {
        "row_id": np.repeat([block.row_id for block in blocks], [len(block) for block in blocks]),
        "position": _joined([block.positions_M for block in blocks], np.int64),
        "token_id": _joined([block.token_ids_M for block in blocks], np.int64),
        "ratio": ratios_M,
        "acceptance": np.minimum(1.0, 1.0 / ratios_M),
        **dict(zip(FEATURES, features_3M, strict=True)),
    }
    columns: list[pa.Array] = []
    for name, type_ in COLUMNS.items():
        if name == "prefix_kind":
            columns.append(pa.DictionaryArray.from_arrays(kinds, list(PREFIX_KINDS)))
        else:
            columns.append(pa.array(values[name].astype(type_.to_pandas_dtype()), type_))
    flat = pa.array(np.ascontiguousarray(hidden_MH).reshape(-1), HIDDEN_TYPES[hidden_dtype])
    columns.append(pa.FixedSizeListArray.from_arrays(flat, hidden_size))
    return pa.table(columns, names=[*COLUMNS, HIDDEN])


def _joined(arrays: Sequence[np.ndarray], dtype: np.dtype | type, *width: int) -> np.ndarray:
    return np.concatenate([np.zeros((0, *width), dtype), *arrays])
