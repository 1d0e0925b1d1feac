"""All shards of a complete run as one file, in input order, and every one of them verified on the way."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from specdist.data.files import write_atomically
from specdist.data.manifest import ShardPlan
from specdist.data.publishing import ROWS_PER_BATCH
from specdist.data.reading import open_shard
from specdist.data.run_folder import RunFolder
from specdist.data.text_formats import write_csv, write_jsonl
from specdist.utils.errors import UserError

SUFFIXES = (".arrow", ".parquet", ".jsonl", ".csv")


def merge_run(folder: RunFolder, output: Path, *, overwrite: bool = False) -> int:
    """Write one Arrow IPC, Parquet, JSON lines or CSV file, as ``output``'s name ends; returns the number of
    its rows.

    Raises :class:`UserError` if the run is not complete, if a shard's file is not the one that was recorded,
    or holds other rows than the manifest says, if ``output`` exists, or if its format cannot hold a column.
    """
    if output.suffix not in SUFFIXES:
        raise UserError(f"--output {output} must end in one of {', '.join(SUFFIXES)}")
    if output.exists() and not overwrite:
        raise UserError(f"--output {output} exists: give another name, or --overwrite to replace it")
    plan, num_samples = folder.plan()
    missing = folder.missing_shards()
    if missing:
        raise UserError(folder.missing_message(missing))
    tables = [_verified(folder, plan, num_samples, shard) for shard in range(plan.num_shards)]
    for shard, table in enumerate(tables):
        if not table.schema.equals(tables[0].schema):
            raise UserError(f"{folder.data_path(shard)} does not have the columns of {folder.data_path(0)}")
    # The file format allows one dictionary per column.
    merged = pa.concat_tables(tables).unify_dictionaries()
    try:
        write_atomically(output, lambda file: _write(file, merged, output.suffix))
    except (pa.ArrowException, TypeError) as error:
        raise UserError(
            f"--output {output} cannot hold these columns ({error}): use .arrow or .parquet"
        ) from error
    return int(merged.num_rows)


def _verified(folder: RunFolder, plan: ShardPlan, num_samples: int, shard: int) -> pa.Table:
    """The rows of a shard, memory-mapped."""
    table = open_shard(folder.paths(shard), verify=True)
    first, end = plan.bounds(shard)
    num_rows = (end - first) * num_samples
    row_ids = np.repeat(np.arange(first, end), num_samples)
    samples = np.tile(np.arange(num_samples), end - first)
    if (
        table.num_rows != num_rows
        or not np.array_equal(table["row_id"].to_numpy(), row_ids)
        or not np.array_equal(table["sample_index"].to_numpy(), samples)
    ):
        raise UserError(
            f"{folder.data_path(shard)} has {table.num_rows} rows; the manifest says {num_rows}: "
            f"{num_samples} of each input row from {first} to {end - 1}, in order"
        )
    return table


def _write(file: BinaryIO, table: pa.Table, suffix: str) -> None:
    if suffix == ".parquet":
        pa.parquet.write_table(table, file)
    elif suffix == ".jsonl":
        write_jsonl(file, table, ROWS_PER_BATCH)
    elif suffix == ".csv":
        write_csv(file, table, ROWS_PER_BATCH)
    else:
        _write_arrow(file, table)


def _write_arrow(file: BinaryIO, table: pa.Table) -> None:
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=ROWS_PER_BATCH)
