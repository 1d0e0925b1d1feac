"""The acceptance rate that a run's trace shows (``jobs/generate.py --trace``)."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from specdist.utils.errors import UserError

TRACE_FILES = "stats/*.trace.arrow"


def acceptance_of(path: Path) -> float:
    """The share of verified tokens that were accepted, over a run folder or one of its trace files.

    Raises :class:`UserError` where no trace can be read, or in which nothing was verified.
    """
    files = sorted(path.glob(TRACE_FILES)) if path.is_dir() else [path]
    if not files:
        raise UserError(
            f"--trace {path} holds no {TRACE_FILES}: name the --output of a run with --trace that has "
            "finished a shard, or one such file"
        )
    num_verified = num_accepted = 0
    for file in files:
        try:
            table = pa.ipc.open_file(file.read_bytes()).read_all().select(["is_verified", "is_accepted"])
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            raise UserError(f"--trace {file} is not a trace of jobs/generate.py: {error}") from error
        num_verified += pc.sum(table["is_verified"]).as_py() or 0
        num_accepted += pc.sum(table["is_accepted"]).as_py() or 0
    if not num_verified:
        raise UserError(f"--trace {path} contains no verified token: give --acceptance instead")
    return float(num_accepted / num_verified)
