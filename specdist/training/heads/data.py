"""A finished collection, and its split into training and held-out rows. Imports no torch.

M examples of one input row or of several, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from specdist.data.run.manifest import Manifest, ShardPlan
from specdist.data.run.reading import open_shard
from specdist.data.run.run_folder import RunFolder
from specdist.models.heads.examples import COLUMNS, HIDDEN
from specdist.models.heads.info import DraftIdentity, HeadKind, HiddenState
from specdist.sampling.keys import stream_key
from specdist.utils.errors import UserError

# What a head's file records of its data: the options that decide a collection's examples.
DESCRIBED = (
    "target", "draft", "prompts", "num_rows", "token_mixing", "hidden_state",
    "temperature", "top_k", "top_p", "max_new_tokens", "seed",
)  # fmt: skip
SPLIT_STREAM = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ExampleSet:
    """The examples of some input rows. Hidden states stay on disk until they are needed.

    Attributes:
        columns: by name, [M] values of all examples in the files.
        spans: first example of each row, and the one after its last.
    """

    folder: str
    manifest: Manifest
    columns: dict[str, np.ndarray]
    hidden: pa.ChunkedArray
    row_ids: np.ndarray
    spans: np.ndarray

    def __len__(self) -> int:
        """Number of rows, not of examples."""
        return len(self.row_ids)

    @property
    def num_examples(self) -> int:
        return int((self.spans[:, 1] - self.spans[:, 0]).sum())

    @property
    def draft(self) -> DraftIdentity:
        return DraftIdentity(**self.manifest.info["draft_identity"])

    @property
    def hidden_state(self) -> HiddenState:
        """Collections that do not say which have the own one."""
        return "drawing" if self.manifest.fingerprint.get("hidden_state") == "drawing" else "own"

    def select(self, rows: np.ndarray) -> ExampleSet:
        """Only these rows, counted from 0, in this order."""
        return replace(self, row_ids=self.row_ids[rows], spans=self.spans[rows])

    def column(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """[M] values, one per example of these rows."""
        return np.concatenate(
            [self.columns[name][:0], *(self.columns[name][begin:end] for begin, end in self.spans[rows])]
        )

    def hidden_states(self, rows: slice) -> np.ndarray:
        """[M, H] of these rows' examples, in the stored data type."""
        width = self.hidden.type.list_size
        parts = [
            self.hidden.slice(begin, end - begin).combine_chunks().flatten().to_numpy(zero_copy_only=False)
            for begin, end in self.spans[rows]
        ]
        return np.concatenate(parts).reshape(-1, width)

    def description(self) -> dict[str, Any]:
        """What the head's file records."""
        known = {**self.manifest.info, **self.manifest.fingerprint}
        # The fingerprint has digests of models and prompts, the info their names.
        names = {name: self.manifest.info[name] for name in ("target", "draft", "prompts")}
        return {
            "folder": self.folder,
            **{name: known[name] for name in DESCRIBED if known.get(name) is not None},
            **names,
            "num_examples": self.num_examples,
            "num_rows": len(self),
        }


def open_examples(folder: str, kind: HeadKind) -> ExampleSet:
    """Open a collection. Raises :class:`UserError` if the folder has none, or one unfinished or of another
    kind."""
    run = RunFolder(Path(folder))
    if not run.manifest_path.is_file():
        raise UserError(f"--data {folder} has no manifest.json: give the --output of jobs/collect.py")
    manifest = run.manifest
    found = manifest.fingerprint.get("kind")
    if found != kind:
        what = f"a collection of kind {found}" if found else "not a collection"
        raise UserError(
            f"--data {folder} is {what}, but --kind is {kind}: collect with jobs/collect.py --kind {kind}"
        )
    plan = ShardPlan(manifest.fingerprint["num_rows"], manifest.fingerprint["rows_per_shard"])
    pending = [shard for shard in range(plan.num_shards) if not run.is_complete(shard)]
    if pending:
        raise UserError(
            f"--data {folder} is not finished: {len(pending)} of {plan.num_shards} shards are missing; "
            "start jobs/collect.py again with the same options"
        )
    table = pa.concat_tables(open_shard(run.paths(shard), verify=False) for shard in range(plan.num_shards))
    if not table.num_rows:
        raise UserError(f"--data {folder} has no examples: none of its prompts was usable")
    columns = {
        name: (table[name].cast(pa.string()) if name == "prefix_kind" else table[name]).to_numpy()
        for name in COLUMNS
    }
    row_ids, begins = np.unique(columns["row_id"], return_index=True)
    spans = np.stack([begins, np.append(begins[1:], table.num_rows)], axis=1)
    return ExampleSet(
        folder=folder, manifest=manifest, columns=columns, hidden=table[HIDDEN], row_ids=row_ids, spans=spans
    )


def split_rows(examples: ExampleSet, validation_share: float, seed: int) -> tuple[ExampleSet, ExampleSet]:
    """Training rows and held-out rows, which are those with the smallest hashes.

    Raises :class:`UserError` if one part would be empty.
    """
    hashes = np.array([stream_key(seed, int(row_id), SPLIT_STREAM) for row_id in examples.row_ids])
    num_kept_out = round(validation_share * len(examples))
    if not 0 < num_kept_out < len(examples):
        raise UserError(
            f"--validation_share {validation_share} of the {len(examples)} rows of --data {examples.folder} "
            f"leaves {len(examples) - num_kept_out} for training and {num_kept_out} for evaluation: collect "
            "more, or change the share"
        )
    is_kept_out = np.zeros(len(examples), bool)
    is_kept_out[np.argsort(hashes, kind="stable")[:num_kept_out]] = True
    return examples.select(np.flatnonzero(~is_kept_out)), examples.select(np.flatnonzero(is_kept_out))
