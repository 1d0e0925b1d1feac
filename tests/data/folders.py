"""A small run folder, its complete contents, and a simulated crash."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.ipc

from specdist.data.leases.opening import open_run_folder
from specdist.data.run.manifest import Manifest
from specdist.data.stats.rows import shard_table
from specdist.data.stats.traces import TracedToken, trace_table
from tests.data.samples import row_result

MANIFEST = Manifest(fingerprint={"seed": 1}, info={"t_target_ms": 1.5})
INPUTS = pa.table({"ref": [f"reference {row}" for row in range(5)]})
TABLE = shard_table(INPUTS, [row_result(row) for row in range(5)], first_row=0, num_samples=1)
STATS = {"num_drafts": 3, "wall_ns": 7}
TRACE = trace_table([(0, 0, (TracedToken(1, 0, 1, 9, 0.5, 0.25, 0.75, None, False, False),))])


class Crash(BaseException):
    """The process ends here: no code may catch this as an error."""


def crash(*_, **__):
    raise Crash


def open_(path, *, manifest=MANIFEST, overwrite=False):
    return open_run_folder(path, manifest, "seed: 1\n", overwrite)


def finish(folder, shard=0):
    with folder.parts(shard) as log:
        for row in range(5):
            log.append(row_result(row))
    folder.finish_shard(shard, TABLE, STATS, TRACE)


def contents(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
