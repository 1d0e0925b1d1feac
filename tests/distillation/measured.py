"""Tokens per target pass and acceptance of several drafts of one target, an EAGLE-3 draft among them.

    python -m tests.distillation.measured --target LARGE --drafts SMALL ... --prompts FILE ... --output RESULT

Every run is one of `jobs/generate.py` on one rank, with blocks of a fixed number of draft tokens, so that
nothing depends on the machine. Of drafts that `jobs/distill.py` has written, its record is kept, too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdist.cli.generate import main as generate

TEMPERATURES = (0.0, 0.6, 1.0)
RECORDED = ("kind", "start", "options", "num_training_sequences", "num_training_tokens", "num_prompts",
            "num_prompt_tokens", "before", "after", "steps", "seconds")  # fmt: skip
COUNTS = (
    "num_completions", "num_completion_tokens", "num_row_steps", "num_rounds", "num_draft_tokens",
    "num_accepted_tokens", "num_state_bytes",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafts", nargs="+", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--num_draft_tokens", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    document: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "tests.distillation.measured", *given]),
        "trained": {Path(draft).name: found for draft in options.drafts if (found := record(Path(draft)))},
        "runs": [],
    }
    for case in itertools.product(options.prompts, TEMPERATURES, options.drafts):
        document["runs"].append(measured(options, *case))
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def record(draft: Path) -> dict[str, Any] | None:
    """Of the training, without its history."""
    path = draft / "distillation.json"
    found = json.loads(path.read_text()) if path.is_file() else None
    return found and {name: found.get(name) for name in RECORDED}


def measured(options: argparse.Namespace, prompts: str, temperature: float, draft: str) -> dict[str, Any]:
    """One run, and its counts."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        errors = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        words = [
            "--target", options.target, "--draft", draft, "--prompts", prompts, "--output", folder,
            "--device", "cpu", "--dtype", "float32", "--overlap", "none", "--policy", "fixed",
            "--num_draft_tokens", str(options.num_draft_tokens), "--limit", str(options.limit),
            "--max_new_tokens", str(options.max_new_tokens), "--temperature", str(temperature),
        ]  # fmt: skip
        assert generate(words) == 0, errors.getvalue()
        shards = [json.loads(each.read_text()) for each in sorted(Path(folder).glob("stats/*.json"))]
    total = {name: sum(shard[name] for shard in shards) for name in COUNTS}
    found = {
        "prompts": Path(prompts).stem,
        "temperature": temperature,
        "draft": Path(draft).name,
        "tokens_per_pass": round(
            (total["num_completion_tokens"] - total["num_completions"]) / total["num_row_steps"], 3
        ),
        "acceptance_per_pos": [
            round(sum(accepted) / max(1, sum(shard["num_drafts"] for shard in shards)), 3)
            for accepted in zip(*(shard["num_accepted_tokens_per_pos"] for shard in shards), strict=True)
        ],
        **total,
    }
    sys.stderr.write(f"{json.dumps(found)}\n")
    return found


if __name__ == "__main__":
    sys.exit(main())
