"""Three targets that share a draft, for real: whether their tokens are those of one target, and the time.

    python -m tests.job.real_groups --target T --draft D --prompts P --output FILE

On a machine with fewer cores than ranks the time says little: the targets wait for one another's cores.
`python -m tests.readme` makes the sentence.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from specdist.data.files import write_json
from specdist.reporting.runs import read_run
from tests.job.launching import ACCELERATE_CONFIG, JOB, arguments
from tests.ranks import REPOSITORY

RESULTS = REPOSITORY / "jobs/benchmarks/groups-small-pair-cpu.json"
NUM_TARGETS = 3
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "rejection": {"temperature": 1, "top_p": 0.9},
}
# Of which the seed fixes the tokens under both rules.
COMMON: dict[str, Any] = {
    "policy": "fixed",
    "num_draft_tokens": 4,
    "overlap": "none",
    "device": "cpu",
    "dtype": "float32",
    "model_impl": "transformers",
    "rows_per_shard": 4,
    "max_num_seqs": 4,
    "max_new_tokens": 64,
    "claim_timeout": 10,
}


def run(options: argparse.Namespace, num_targets: int, rule: str, output: Path) -> dict[str, Any]:
    """One launch: rows, tokens, and tokens per second from the first request to the last row."""
    given = {name: getattr(options, name) for name in ("target", "draft", "prompts", "limit")}
    given |= COMMON | RULES[rule] | {"num_targets": num_targets, "output": output}
    subprocess.run(
        [
            *(sys.executable, "-m", "specdist.job.launch", "--config_file", str(ACCELERATE_CONFIG)),
            *("--num_processes", str(num_targets + 1), str(JOB), *arguments(**given)),
        ],
        check=True,
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
    )
    found = read_run(output, rule)
    assert found.span_s is not None
    return {
        "rule": rule,
        "num_targets": num_targets,
        "num_rows": found.total.num_completions,
        "num_tokens": found.total.num_completion_tokens,
        "num_groups_at_work": found.num_replicas,
        "tokens_per_s": round(found.total.num_completion_tokens / found.span_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    for name in ("target", "draft", "prompts"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--launches", type=int, default=2, help="of three targets, with each rule")
    parser.add_argument("--output", type=Path, required=True)
    chosen = parser.parse_args()
    results, others = [], {}
    with tempfile.TemporaryDirectory() as name:
        for rule in RULES:
            folders = [Path(name) / f"{rule}-{number}" for number in range(1 + chosen.launches)]
            counts = [1] + chosen.launches * [NUM_TARGETS]
            results += [
                run(chosen, count, rule, folder) for count, folder in zip(counts, folders, strict=True)
            ]
            alone = completions(folders[0])
            others[rule] = [
                sum(alone[row] != ids for row, ids in completions(folder).items()) for folder in folders[1:]
            ]
    write_json(
        chosen.output,
        {
            "command": f"python -m tests.job.real_groups {shlex.join(sys.argv[1:])}",
            "num_cores": len(os.sched_getaffinity(0)),
            # Of every launch: rows whose tokens are not those of one target and its draft.
            "num_other_rows": others,
            "results": results,
        },
    )


def completions(folder: Path) -> dict[int, list[int]]:
    """Token ids by row."""
    found: dict[int, list[int]] = {}
    for path in sorted((folder / "shards").glob("*.arrow")):
        table = pa.ipc.open_file(path).read_all()
        found |= zip(table["row_id"].to_pylist(), table["completion_ids"].to_pylist(), strict=True)
    return found


def markdown() -> str:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    parts = []
    for rule, others in found["num_other_rows"].items():
        own = [one for one in found["results"] if one["rule"] == rule]
        alone, *shared = (one["tokens_per_s"] for one in own)
        parts.append(
            f"{rule}: {sum(others)} of {len(others) * own[0]['num_rows']} rows have other tokens, "
            f"{alone:,.0f} tokens/s with one target, {min(shared):,.0f} to {max(shared):,.0f} with three"
        )
    text = (
        f"For real, in launches of three targets and a draft on {found['num_cores']} cores, fewer than "
        f"ranks, beside one target and its draft: {'; '.join(parts)}. `{found['command']}`"
    )
    return textwrap.fill(text, 118, break_on_hyphens=False, break_long_words=False)


if __name__ == "__main__":
    main()
