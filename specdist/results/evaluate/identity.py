"""The comparison of two runs, token by token.

N rows that both runs have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from specdist.job.texts.template_clock import CLOCK
from specdist.results.evaluate.reading import Completions
from specdist.utils.errors import UserError

KEY = ("row_id", "sample_index")
# How rows can differ: by a token, by their length or finish reason, or by an error in one run.
TOKEN, LENGTH, FAILED = "token", "length", "error"
QUARTILES = {"min": 0.0, "lower_quartile": 0.25, "median": 0.5, "upper_quartile": 0.75, "max": 1.0}
# Fields of the manifest's fingerprint that decide the target's own completion of a prompt.
SAMPLE_FIELDS = {"target", "dtype", "temperature", "max_new_tokens", "stop"}
DRAWING_FIELDS = {"top_k", "top_p", "seed"}
# Fields that decide no token of a row in both runs; prompts are compared row by row.
LAYOUT_FIELDS = {
    "prompts", "prompt_column", "messages_column", "system_prompt", "chat_template_kwargs",
    "continue_final_message", "tools_column", "num_rows", "rows_per_shard", "num_samples", "trace",
    "max_seq_len",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Identity:
    """How two runs differ.

    Attributes:
        num_rows: rows in both runs; ``num_only_first`` and ``num_only_second`` are in one of them.
        num_identical: rows with the same tokens and the same finish reason.
        kinds: number of differing rows by kind: ``token``; ``length``: one is the beginning of the other;
            ``error``.
        first_differences: position of the first difference in each differing completion [N'].
        relative_positions: the same, divided by the longer completion's length.
        num_common_tokens, num_tokens: of the first run's rows, tokens before the first difference, and all.
        columns: per row, for differences.arrow.
        expectation: whether the same tokens are to be expected, and why.
    """

    num_rows: int
    num_only_first: int
    num_only_second: int
    num_identical: int
    kinds: Mapping[str, int]
    first_differences: np.ndarray
    relative_positions: np.ndarray
    num_common_tokens: int
    num_tokens: int
    expectation: str
    columns: Mapping[str, list[Any]] = field(repr=False)

    def document(self) -> dict[str, Any]:
        return {
            "num_rows": self.num_rows,
            "num_rows_only_in_first": self.num_only_first,
            "num_rows_only_in_second": self.num_only_second,
            "num_identical": self.num_identical,
            "share_identical": self.num_identical / self.num_rows,
            "share_of_tokens_before_first_difference": (
                self.num_common_tokens / self.num_tokens if self.num_tokens else None
            ),
            "kinds_of_difference": dict(self.kinds),
            "first_difference": quartiles(self.first_differences),
            "first_difference_relative": quartiles(self.relative_positions),
            "first_difference_histogram": position_histogram(self.first_differences),
            "expectation": self.expectation,
        }


def compare_tokens(first: Completions, second: Completions) -> Identity:
    """Compare row by row. Raises :class:`UserError` if no row is in both runs, or prompts differ."""
    names = [*KEY, "prompt", "completion_ids", "finish_reason"]
    tables = [run.table.select(names) for run in (first, second)]
    index_first, index_second = _matching_rows(tables[0], tables[1])
    if not len(index_first):
        raise UserError(f"{first.path} and {second.path} have no row in common, by row_id and sample_index")
    _check_prompts(first, second, index_first, index_second)
    ours = tables[0].take(pa.array(index_first))
    theirs = tables[1].take(pa.array(index_second))
    parts = [
        _compare(*row)
        for row in zip(
            _token_lists(ours),
            _token_lists(theirs),
            ours["finish_reason"].to_pylist(),
            theirs["finish_reason"].to_pylist(),
            strict=True,
        )
    ]
    lengths = [len(tokens) for tokens in _token_lists(ours)]
    differing = [part for part in parts if part is not None]
    common = [
        length if part is None else min(part.position, length)
        for part, length in zip(parts, lengths, strict=True)
    ]
    return Identity(
        num_rows=len(parts),
        num_only_first=tables[0].num_rows - len(parts),
        num_only_second=tables[1].num_rows - len(parts),
        num_identical=len(parts) - len(differing),
        kinds=Counter(part.kind for part in differing),
        first_differences=np.array([part.position for part in differing], np.int64),
        relative_positions=np.array([part.position / max(1, part.num_tokens) for part in differing]),
        num_common_tokens=sum(common),
        num_tokens=sum(lengths),
        expectation=expectation(first, second),
        columns={
            **{name: ours[name].to_pylist() for name in KEY},
            "difference": [None if part is None else part.kind for part in parts],
            "first_difference": [None if part is None else part.position for part in parts],
        },
    )


def expectation(first: Completions, second: Completions) -> str:
    """Whether the manifests let one expect the same tokens in both runs."""
    if first.manifest is None or second.manifest is None:
        return "unknown: a merged file does not record how its run was generated"
    ours, theirs = first.manifest.fingerprint, second.manifest.fingerprint
    differing = {
        name for name in (set(ours) | set(theirs)) - LAYOUT_FIELDS if ours.get(name) != theirs.get(name)
    }
    is_greedy = ours.get("temperature") == 0 == theirs.get("temperature")
    relevant = differing & (SAMPLE_FIELDS if is_greedy else SAMPLE_FIELDS | DRAWING_FIELDS)
    if relevant:
        return f"different tokens: the runs differ in {', '.join(sorted(relevant))}"
    if differing and any(run.is_exact is False for run in (first, second)):
        return "different tokens: one of the runs is lossy"
    limit = ""
    if ours.get("max_seq_len") != theirs.get("max_seq_len"):
        limit = ", except in rows that reach the smaller max_seq_len"
    if is_greedy or ours.get("acceptance") == "gumbel" == theirs.get("acceptance"):
        how = "greedy" if is_greedy else "gumbel with one seed"
        same = "the same tokens, except for rounding where logits are nearly tied"
        return f"{same}: {how} emits the target's own{limit}"
    if differing:
        names = ", ".join(sorted(differing))
        return f"the same distribution, but different tokens: with rejection they depend on {names}"
    if "distribution" in (
        run.manifest.info.get("reproducibility") for run in (first, second) if run.manifest
    ):
        return "the same distribution, but different tokens: they depend on the batch"
    return f"the same tokens, up to rounding: the runs have the same settings{limit}"


def quartiles(values: np.ndarray) -> dict[str, float] | None:
    """None without values."""
    if not len(values):
        return None
    return {name: float(np.quantile(values, share)) for name, share in QUARTILES.items()}


def position_histogram(positions: np.ndarray) -> list[dict[str, int]]:
    """In intervals that double: 0, 1, 2-3, 4-7, ...; empty ones are left out."""
    buckets = Counter(int(position).bit_length() for position in positions)
    return [
        {"from": 2 ** (bits - 1) if bits else 0, "to": 2**bits - 1 if bits else 0, "num_rows": buckets[bits]}
        for bits in sorted(buckets)
    ]


@dataclass(frozen=True)
class _Parting:
    """The first difference of a row's completions; ``num_tokens`` are those of the longer one."""

    kind: str
    position: int
    num_tokens: int


def _compare(ours: np.ndarray, theirs: np.ndarray, our_end: str, their_end: str) -> _Parting | None:
    """None for completions with the same tokens and the same finish reason."""
    shorter, longer = sorted((len(ours), len(theirs)))
    unequal = np.flatnonzero(ours[:shorter] != theirs[:shorter])
    position = int(unequal[0]) if len(unequal) else shorter
    if (our_end == FAILED) != (their_end == FAILED):
        return _Parting(FAILED, position, longer)
    if len(unequal):
        return _Parting(TOKEN, position, longer)
    if shorter != longer or our_end != their_end:
        return _Parting(LENGTH, position, longer)
    return None


def _matching_rows(first: pa.Table, second: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the common rows in both tables."""
    keys = []
    for table in (first, second):
        row_ids, samples = (table[name].to_numpy().astype(np.int64) for name in KEY)
        keys.append(row_ids * 2**32 + samples)
    _, index_first, index_second = np.intersect1d(keys[0], keys[1], return_indices=True)
    return index_first, index_second


def _check_prompts(first: Completions, second: Completions, ours_N: np.ndarray, theirs_N: np.ndarray) -> None:
    prompts = [
        run.table["prompt"].take(pa.array(index)).to_pylist()
        for run, index in ((first, ours_N), (second, theirs_N))
    ]
    for index, (ours, theirs) in enumerate(zip(*prompts, strict=True)):
        if ours != theirs:
            row_id = first.table["row_id"][int(ours_N[index])].as_py()
            manifests = [run.manifest for run in (first, second) if run.manifest is not None]
            clocks = sorted({str(found.info[CLOCK]) for found in manifests if CLOCK in found.info})
            told = f" (a chat template may tell their dates, {' and '.join(clocks)})" if clocks[1:] else ""
            raise UserError(
                f"--against {second.path}: row {row_id} has a different prompt there{told}; compare runs "
                "over the same prompts"
            )


def _token_lists(table: pa.Table) -> list[np.ndarray]:
    return [np.asarray(ids.values) for ids in table["completion_ids"]]
