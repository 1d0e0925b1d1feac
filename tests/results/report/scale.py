"""How long a report of a large run takes, and how large it is: a thousand shards of a thousand rows.

    python -m tests.results.report.scale [FOLDER]

No test, since it is about time. It writes the folder (some 5 GB) unless it is there; the last line is JSON.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc

from specdist.data.run.run_folder import RunFolder
from specdist.data.store.files import json_bytes, sealed, unsealed
from tests.ranks import REPOSITORY
from tests.results.report.synthetic import SyntheticRun, write_run

NUM_SHARDS, ROWS_PER_SHARD = 1000, 1000
# So many different shards are made; the others are copies with rows and times of their own.
NUM_MADE = 4
HOUR_NS = 3600 * 10**9


def write_large_run(path: Path) -> None:
    """By copying: a shard of a thousand rows of coins takes seconds to make."""
    made = SyntheticRun(
        num_shards=NUM_SHARDS, num_finished=NUM_MADE, rows_per_shard=ROWS_PER_SHARD, num_error_rows=3,
        num_draft_tokens=8,
    )  # fmt: skip
    folder = RunFolder(write_run(path, made))
    for shard in range(NUM_MADE, NUM_SHARDS):
        source, target = folder.paths(shard % NUM_MADE), folder.paths(shard)
        # The rows' numbers are those of the source, which a report does not look at.
        for one, other in zip(source.all(), target.all(), strict=True):
            shutil.copyfile(one, other)
        stats = unsealed(json.loads(target.stats.read_bytes()))
        stats["replica"] = f"replica-{shard % 8}"
        begin_ns = stats["work_span"]["begin_unix_ns"] + shard // 8 * HOUR_NS // 10
        stats["work_span"] = {"begin_unix_ns": begin_ns, "end_unix_ns": begin_ns + HOUR_NS // 9}
        stats["wall_ns"] = int(stats["wall_ns"] * (0.8 + shard % 37 / 90))
        target.stats.write_bytes(json_bytes(sealed(stats)))


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(sys.argv[1] if len(sys.argv) > 1 else temporary) / "run"
        if not path.exists():
            write_large_run(path)
        folder = RunFolder(path)
        begin = time.perf_counter()
        job = [sys.executable, str(REPOSITORY / "jobs" / "report.py"), str(path)]
        ended = subprocess.run(job, check=True, capture_output=True, text=True)
        seconds = time.perf_counter() - begin
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        with pa.memory_map(str(folder.trace_path(0))) as source:
            num_traced = pa.ipc.open_file(source).read_all().num_rows
        document = {
            "seconds": round(seconds, 2),
            "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
            "num_bytes": json.loads(ended.stdout.splitlines()[-1])["num_bytes"],
            "num_shards": NUM_SHARDS,
            "num_rows": NUM_SHARDS * ROWS_PER_SHARD,
            "num_traced_tokens": num_traced * NUM_SHARDS,
        }
        print(json.dumps(document))  # noqa: T201 (the result)


if __name__ == "__main__":
    main()
