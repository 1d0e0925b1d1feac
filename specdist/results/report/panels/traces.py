"""The draft tokens of a run with ``--trace``: how often they were accepted.

C traced tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from specdist.data.run.reading import read_columns, traces_to_read
from specdist.data.run.run_folder import RunFolder

COLUMNS = ("entropy", "is_verified", "is_accepted")
# About three million tokens: more would not improve the figures.
MAX_BYTES_READ = 160_000_000
NUM_INTERVALS = 10
Z_95 = 1.96


@dataclass(frozen=True)
class TracedTokens:
    """Columns [C] of ``num_shards_read`` of the ``num_shards`` traces, spread over the run."""

    columns: pa.Table
    num_shards: int
    num_shards_read: int

    @property
    def num_tokens(self) -> int:
        return int(self.columns.num_rows)

    @property
    def num_verified(self) -> int:
        """Tokens verified by the target."""
        return int(self.column("is_verified").sum())

    def column(self, name: str) -> np.ndarray:
        """[C] values of a column."""
        values: np.ndarray = self.columns[name].to_numpy()
        return values


@dataclass(frozen=True)
class Share:
    """How many of the tokens with a feature between ``low`` and ``high`` were accepted."""

    low: float
    high: float
    num_tokens: int
    num_true: int

    @property
    def value(self) -> float:
        return self.num_true / self.num_tokens

    @property
    def bounds(self) -> tuple[float, float]:
        """The 95% interval of Wilson."""
        num, share, z2 = self.num_tokens, self.value, Z_95**2
        middle = (share + z2 / (2 * num)) / (1 + z2 / num)
        half = Z_95 / (1 + z2 / num) * float(np.sqrt(share * (1 - share) / num + z2 / (4 * num**2)))
        return middle - half, middle + half


def read_traced_tokens(folder: RunFolder, shards: Iterable[int]) -> TracedTokens | None:
    """The traces of these shards; None if there is no trace, or no token in any."""
    read, num_traces = traces_to_read(folder, shards, MAX_BYTES_READ)
    if not read:
        return None
    columns = pa.concat_tables(read_columns(path, COLUMNS) for path in read)
    return TracedTokens(columns, num_traces, len(read)) if columns.num_rows else None


def entropy_edges(traces: Sequence[TracedTokens]) -> np.ndarray:
    """Equal intervals for all traces; the last one also takes the rare larger entropies."""
    last = max((float(np.quantile(trace.column("entropy"), 0.99)) for trace in traces), default=0.0)
    return np.linspace(0, last or 1.0, NUM_INTERVALS + 1)


def acceptance_by_entropy(trace: TracedTokens, edges: np.ndarray) -> list[Share]:
    """For each interval, the share of the verified tokens that were accepted."""
    is_verified_C = trace.column("is_verified").astype(bool)
    entropies_C = trace.column("entropy")[is_verified_C]
    is_accepted_C = trace.column("is_accepted").astype(bool)[is_verified_C]
    num_intervals = len(edges) - 1
    places_C = np.clip(np.searchsorted(edges, entropies_C, side="right") - 1, 0, num_intervals - 1)
    counts = np.bincount(places_C, minlength=num_intervals)
    accepted = np.bincount(places_C, weights=is_accepted_C, minlength=num_intervals)
    return [
        Share(float(edges[index]), float(edges[index + 1]), int(counts[index]), int(accepted[index]))
        for index in range(num_intervals)
    ]
