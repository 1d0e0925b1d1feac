"""What opening many prompts takes: seconds, and memory of the process.

    python -m tests.scale.rows --rows 1000000 10000000

For each number of rows a file is written, and opened by a new process twice: ``first`` as by the first
start on a machine, ``again`` as by every other replica and restart; then rows at random are read. Memory is
what the process has of its own (``RssAnon``): mapped files are the system's to drop. JSONL in memory is what
small files are read as; requests are an OpenAI batch. The last line on stdout is a JSON document.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import re
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from specdist.data.formats import converted
from specdist.data.formats.prompts import open_prompts
from specdist.utils.table import Table, decimals
from tests.ranks import REPOSITORY

RESULTS = REPOSITORY / "jobs/benchmarks/rows.json"
TEXT = "Summarise the following report in one sentence, and name the two figures that matter most"
NUM_READ, NUM_AT_A_TIME = 2000, 100_000
SUFFIXES = {
    "Parquet": ".parquet", "JSONL": ".jsonl", "CSV": ".csv", "requests": ".jsonl",
    "JSONL, in memory": ".jsonl",
}  # fmt: skip
ABOUT = '"method": "POST", "url": "/v1/completions"'
# More rows are not read into memory for comparison.
MOST_IN_MEMORY = 10**6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10**6])
    parser.add_argument("--kinds", nargs="+", choices=list(SUFFIXES), default=list(SUFFIXES))
    parser.add_argument("--output", type=Path, help="JSON file to which the results are added")
    options = parser.parse_args()
    results = []
    for num_rows in options.rows:
        for kind in options.kinds:
            if kind.endswith("memory") and num_rows > MOST_IN_MEMORY:
                continue
            with tempfile.TemporaryDirectory() as name:
                path = write(Path(name, f"prompts{SUFFIXES[kind]}"), kind, num_rows)
                results.append({"kind": kind, "rows": num_rows, "file_mb": round(path.stat().st_size / 1e6)})
                for start in ("first", "again"):
                    results[-1][start] = in_a_process(path, kind)
            print(json.dumps(results[-1]), flush=True)
    command = shlex.join(["python", "-m", "tests.scale.rows", *sys.argv[1:]])
    document: dict[str, Any] = {"commands": [], "results": []}
    if options.output is not None and options.output.exists():
        document = json.loads(options.output.read_text())
    document["commands"].append(command)
    document["results"] += results
    if options.output is not None:
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


def write(path: Path, kind: str, num_rows: int) -> Path:
    if path.suffix == ".parquet":
        schema = pa.schema([("prompt", pa.string()), ("id", pa.int64())])
        with pyarrow.parquet.ParquetWriter(path, schema) as writer:
            for first in range(0, num_rows, NUM_AT_A_TIME):
                rows = range(first, min(first + NUM_AT_A_TIME, num_rows))
                writer.write_table(
                    pa.table({"prompt": [f"{TEXT} ({row})" for row in rows], "id": rows}, schema)
                )
        return path
    with path.open("w") as file:
        if kind == "CSV":
            file.write("prompt,id\n")
        for row in range(num_rows):
            if kind == "CSV":
                file.write(f'"{TEXT} ({row})",{row}\n')
            elif kind == "requests":
                body = f'{{"prompt": "{TEXT} ({row})", "max_tokens": {1 + row % 100}}}'
                file.write(f'{{"custom_id": "{row}", {ABOUT}, "body": {body}}}\n')
            else:
                file.write(f'{{"prompt": "{TEXT} ({row})", "id": {row}}}\n')
    return path


def in_a_process(path: Path, kind: str) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=measure, args=(path, kind, theirs))
    process.start()
    found: dict[str, float] = ours.recv()
    process.join()
    return found


def measure(path: Path, kind: str, pipe: Any) -> None:
    """What a replica does before its models, and then row by row; a relaunch knows the files' digests."""
    if kind.endswith("memory"):
        converted.LARGE_BYTES = 2**60
    before_mb, start = own_mb(), time.monotonic()
    known = path.with_suffix(".stamps")
    stamps = (
        [converted.FileStamp(**stamp) for stamp in json.loads(known.read_text())] if known.exists() else []
    )
    prompts = open_prompts(
        str(path),
        prompt_column="body" if kind == "requests" else "prompt",
        messages_column=None,
        limit=None,
        cache_dir=str(path.parent),
        known=stamps,
    )
    assert prompts.fingerprint
    opened_s = time.monotonic() - start
    known.write_text(json.dumps([vars(stamp) for stamp in prompts.watched.stamps]))
    chance, start = random.Random(0), time.monotonic()
    for _ in range(NUM_READ // 100):
        first = chance.randrange(prompts.num_rows - 100)
        assert all(str(prompts.prompt(row)).endswith(f"({row})") for row in range(first, first + 100))
    pipe.send({
        "open_s": round(opened_s, 2), "read_row_ms": round(1e3 * (time.monotonic() - start) / NUM_READ, 3),
        "own_mb": round(own_mb() - before_mb), "peak_mb": round(status_mb("VmHWM")),
    })  # fmt: skip


def own_mb() -> float:
    return status_mb("RssAnon")


def status_mb(name: str) -> float:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) / 1e3


def markdown() -> str:
    """The results as a table."""
    return Table.of(
        [
            {
                "prompts": entry["kind"],
                "rows": f"{entry['rows']:,}",
                "file, MB": f"{entry['file_mb']:,}",
                "first start, s": decimals(entry["first"]["open_s"]),
                "every other, s": decimals(entry["again"]["open_s"]),
                "own memory, MB": f"{entry['again']['own_mb']:,}",
            }
            for entry in json.loads(RESULTS.read_text())["results"]
        ],
        num_names=2,
    ).markdown()


if __name__ == "__main__":
    main()
