"""What learning on the way costs and gains by the wall clock: a target and its draft, a process each.

    python -m tests.learning.wall_clock --target TARGET --draft DRAFT --prompts FILE --out FILE

The same rows with and without `--adapt_draft`, one run after the other, so often as `--repeats` says; every
rank has one thread. A machine that is otherwise idle, with a core for each rank, is needed. Tokens per second
have both in them, what a better draft gains and what learning costs; the time of a round of as many sequences
has the cost alone.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.job.launching import read_output, shard_stats
from tests.job.ranks import fork_ranks

COUNTS = ("num_completion_tokens", "num_rounds", "num_row_steps", "num_adapt_steps", "num_adapt_switches")
NS_PER_S = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "draft", "prompts"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--rows", type=int, default=240)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for repeat in range(options.repeats):
        # What comes first changes, should the machine get slower.
        for adapts in ((False, True), (True, False))[repeat % 2]:
            runs.append(measured(options, adapts=adapts))
            sys.stderr.write(f"{json.dumps(runs[-1])}\n")
    assert len({run.pop("completions") for run in runs}) == 1, "learning has changed what was said"
    document = {
        "command": "python -m tests.learning.wall_clock " + shlex.join(sys.argv[1:]),
        "num_rows": options.rows,
        **{f"{name}_with_over_without": ratio(runs, name) for name in ("tokens_per_s", "round_ms")},
        "runs": runs,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")


def measured(options: argparse.Namespace, *, adapts: bool) -> dict[str, Any]:
    """One run from its first round to its last, without loading."""
    with tempfile.TemporaryDirectory() as folder:
        words = {
            "target": options.target, "draft": options.draft, "prompts": options.prompts, "output": folder,
            "device": "cpu", "temperature": 0, "limit": options.rows, "rows_per_shard": 40,
            "max_new_tokens": 96, "max_num_seqs": 8, "num_draft_tokens": 4,
        }  # fmt: skip
        ended = fork_ranks(2, **words, **({"adapt_draft": True} if adapts else {}))
        assert ended.code == 0, ended.stderr
        shards, table = shard_stats(Path(folder)), read_output(Path(folder))
    total = {name: sum(shard[name] for shard in shards) for name in COUNTS}
    wall_s = sum(shard["wall_ns"] for shard in shards) / NS_PER_S
    return {
        "adapts": adapts,
        "tokens_per_s": total["num_completion_tokens"] / wall_s,
        "round_ms": 1e3 * wall_s / total["num_rounds"],
        "adapt_s": sum(shard["adapt_ns"] for shard in shards) / NS_PER_S,
        "wall_s": wall_s,
        **total,
        "completions": str(table.column("completion_ids").to_pylist()),
    }


def ratio(runs: list[dict[str, Any]], name: str) -> float:
    """Of the medians."""
    with_it, without = (
        statistics.median(run[name] for run in runs if run["adapts"] == adapts) for adapts in (True, False)
    )
    return with_it / without


if __name__ == "__main__":
    main()
