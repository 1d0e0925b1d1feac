"""The comparison of two runs, token by token.

N rows that both runs have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from specdist.results.evaluate.reading import Completions
from specdist.utils.errors import UserError

KEY = ("row_id", "sample_index")
# How rows can differ: by a token, by their length or finish reason, or by an error in one run.
TOKEN, LENGTH, FAILED = "token", "length", "error"
# Fields of the manifest's fingerprint that decide the target's own completion of a prompt.
SAMPLE_FIELDS = {"target", "dtype", "temperature", "max_new_tokens", "stop"}
DRAWING_FIELDS = {"top_k", "top_p", "seed"}
# Fields that decide no token of a row in both runs; prompts are compared row by row.
LAYOUT_FIELDS = {
    "prompts", "prompt_column", "messages_column", "system_prompt", "chat_template_kwargs",
    "continue_final_message", "tools_column", "num_rows", "rows_per_shard", "num_samples", "trace",
    "max_seq_len",
}  # fmt: skip


def compare_tokens(
    first: Completions, second: Completions
) -> tuple[dict[str, Any], Mapping[str, Sequence[Any]]]:
    """Compare row by row.

    Returns the document, and for differences.arrow, per row [N], the kind of the difference and its position:
    None for rows with the same tokens and the same finish reason. Raises :class:`UserError` if no row is in
    both runs, or prompts differ.
    """
    names = [*KEY, "prompt", "completion_ids", "finish_reason"]
    tables = [run.table.select(names) for run in (first, second)]
    index_first, index_second = _matching_rows(tables[0], tables[1])
    if not len(index_first):
        raise UserError(f"{first.path} and {second.path} have no row in common, by row_id and sample_index")
    _check_prompts(first, second, index_first, index_second)
    ours, theirs = tables[0].take(pa.array(index_first)), tables[1].take(pa.array(index_second))
    our_tokens = _token_lists(ours)
    ends = [rows["finish_reason"].to_pylist() for rows in (ours, theirs)]
    found = [_compare(*row) for row in zip(our_tokens, _token_lists(theirs), *ends, strict=True)]
    kinds = Counter(kind for kind, _ in found if kind is not None)
    positions = [position for _, position in found if position is not None]
    lengths = [len(tokens) for tokens in our_tokens]
    # The first run's tokens that both have.
    num_common = sum(
        length if position is None else min(position, length)
        for (_, position), length in zip(found, lengths, strict=True)
    )
    num_identical = len(found) - len(positions)
    document = {
        "num_rows": len(found),
        "num_rows_only_in_first": tables[0].num_rows - len(found),
        "num_rows_only_in_second": tables[1].num_rows - len(found),
        "num_identical": num_identical,
        "share_identical": num_identical / len(found),
        "share_of_tokens_before_first_difference": num_common / sum(lengths) if sum(lengths) else None,
        "kinds_of_difference": dict(kinds),
        "median_first_difference": float(np.median(positions)) if positions else None,
        "expectation": expectation(first, second),
    }
    columns = {
        **{name: ours[name].to_pylist() for name in KEY},
        "difference": [kind for kind, _ in found],
        "first_difference": [position for _, position in found],
    }
    return document, columns


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


def _compare(
    ours: np.ndarray, theirs: np.ndarray, our_end: str, their_end: str
) -> tuple[str | None, int | None]:
    """The kind of difference between two completions, and its position."""
    shorter = min(len(ours), len(theirs))
    unequal = np.flatnonzero(ours[:shorter] != theirs[:shorter])
    position = int(unequal[0]) if len(unequal) else shorter
    if (our_end == FAILED) != (their_end == FAILED):
        return FAILED, position
    if len(unequal):
        return TOKEN, position
    if len(ours) != len(theirs) or our_end != their_end:
        return LENGTH, position
    return None, None


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
            raise UserError(
                f"--against {second.path}: row {row_id} has a different prompt there; compare runs over "
                "the same prompts (a chat template may tell the date of its run)"
            )


def _token_lists(table: pa.Table) -> list[np.ndarray]:
    return [np.asarray(ids.values) for ids in table["completion_ids"]]
