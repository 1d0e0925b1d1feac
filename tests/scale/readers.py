"""What one reader of a run takes, in a process that imports nothing else: seconds without the imports, and
the most memory, with them.

    python -m tests.scale.readers RUN report
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import specdist
from specdist.data.run.merging import merge_run
from specdist.data.run.run_folder import RunFolder
from specdist.job.totals.status import StatusReader
from specdist.results.report import write_report


def main(path: Path, name: str) -> None:
    """Print what this reader takes; nothing is made durable."""
    output = path.parent / "merged.arrow"
    readers: dict[str, Callable[[], object]] = {
        "status": lambda: StatusReader(path).read(),
        "load_run": lambda: specdist.load_run(path),
        "statistics": lambda: specdist.load_run(path).statistics,
        "report": lambda: write_report([path]),
        "merge": lambda: merge_run(RunFolder(path), output, overwrite=True),
        "copy": lambda: _copy(path, output),
    }
    start = time.monotonic()
    with mock.patch("os.fsync", lambda descriptor: None):
        readers[name]()
    seconds = time.monotonic() - start
    output.unlink(missing_ok=True)
    # What getrusage knows is at least what the parent had when it started this process.
    (peak_kb,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    peak_mb = int(peak_kb) * 1024 / 1e6
    print(json.dumps({"seconds": round(seconds, 2), "peak_mb": round(peak_mb)}))


def _copy(path: Path, output: Path) -> None:
    with output.open("wb") as file:
        for data in sorted(path.glob("shards/**/shard-*.arrow")):
            file.write(data.read_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
