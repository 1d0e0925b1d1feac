"""Ways to fill nodes with a 70B target and a 1B draft, before target groups could share drafts, and after.

    python -m tests.planning.before_after --output jobs/benchmarks/plans-70b.json

*Before* are the ways of one target per draft with a GPU of its own, and the target alone; both are what
`jobs/plan.py` predicts at present. `python -m tests.readme` makes the table.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from specdist.data.files import write_json
from specdist.planning.advise import Plan, Planner, Work, recommend
from specdist.planning.filling import Site
from specdist.planning.hardware import find_gpu
from specdist.planning.job import open_model
from specdist.utils.table import Table
from tests.ranks import REPOSITORY

RESULTS = REPOSITORY / "jobs/benchmarks/plans-70b.json"
SITES = (("h100-sxm", 1), ("h200", 1), ("h100-sxm", 2))
BATCH_SIZES = (8, 32, 64)
WORK = Work(prompt_tokens=1000, output_tokens=500, num_prompts=10_000, acceptance=0.8, caught=0.5)


def way(plan: Plan) -> dict[str, Any]:
    settings, shape = plan.settings, plan.shape
    return {
        "mode": "draft on rank 0" if settings.mode == "colocated" else settings.mode,
        "tp_size": shape.tp_size,
        "num_targets": shape.num_targets,
        "num_drafts": shape.num_drafts,
        "num_replicas": plan.num_replicas,
        "num_gpus": plan.num_gpus * plan.num_replicas,
        "batch_size": settings.num_rows,
        "num_draft_tokens": settings.num_draft_tokens,
        "tokens_per_s": round(plan.tokens_per_s, 1),
    }


def found() -> list[dict[str, Any]]:
    target, dtype = open_model("--target", "70b", "bfloat16")
    draft, _ = open_model("--draft", "1b", "bfloat16")
    results = []
    for name, num_nodes in SITES:
        for size in BATCH_SIZES:
            site = Site(gpu=find_gpu(name, dtype), gpus_per_node=8, num_nodes=num_nodes, max_num_seqs=size)
            plans = Planner(target, draft, site, WORK).best_plans()
            shares = [plan.settings.mode == "colocated" or plan.shape.num_targets > 1 for plan in plans]
            before = recommend([plan for plan, is_new in zip(plans, shares, strict=True) if not is_new])
            groups = max(
                (plan for plan in plans if plan.shape.num_targets > 1), key=lambda plan: plan.tokens_per_s
            )
            after = recommend(plans)
            assert before is not None and after is not None
            results.append({
                "gpus": f"{8 * num_nodes} x {name}", "most_sequences": size,
                "before": way(before), "after": way(after), "best_of_shared_drafts": way(groups),
            })  # fmt: skip
    return results


def words(one: dict[str, Any]) -> str:
    targets = one["num_targets"] * one["num_replicas"]
    drafts = one["num_drafts"] * one["num_replicas"]
    parts = f"{targets} targets of {one['tp_size']}" if targets > 1 else f"1 target of {one['tp_size']}"
    beside = f", {drafts} draft{'s' * (drafts > 1)}" if drafts else ""
    length = f", K = {one['num_draft_tokens']}" if one["num_draft_tokens"] else ""
    return f"{one['mode']}: {parts}{beside}, batch {one['batch_size']}{length}"


def markdown() -> str:
    """A line for each site and most sequences of a target."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows: list[dict[str, str | int | None]] = []
    for one in results["results"]:
        row: dict[str, str | int | None] = {
            "GPUs": one["gpus"], "at most": f"{one['most_sequences']} sequences"
        }  # fmt: skip
        for name in ("before", "after", "best_of_shared_drafts"):
            title = name.replace("_", " ")
            row[title] = words(one[name])
            row[f"{title}, tokens/s"] = f"{one[name]['tokens_per_s']:,.0f} on {one[name]['num_gpus']}"
        before, after = (one[name]["tokens_per_s"] / one[name]["num_gpus"] for name in ("before", "after"))
        row["after / before, per GPU with work"] = f"{after / before:.2f}"
        rows.append(row)
    return f"{Table.of(rows, num_names=2).markdown()}\n\n`{results['command']}`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True)
    chosen = parser.parse_args()
    command = f"python -m tests.planning.before_after {shlex.join(sys.argv[1:])}"
    write_json(chosen.output, {"command": command, "results": found()})


if __name__ == "__main__":
    main()
