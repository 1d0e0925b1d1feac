"""Tokens per target pass by the source of the candidates: a draft model, memory, and both.

    python -m tests.drafters.measured --target LARGE --draft SMALL --prompts FILE ... --output FILE.json

Every run is one of `jobs/generate.py` on one rank, with blocks of a fixed number of draft tokens, so that
nothing depends on the machine. FILE:SAMPLES are several samples of each row, where memory has the other rows,
too; FILE+ is a second epoch: memory has the completions of another run over the same prompts.
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
SOURCES = ("draft", "memory", "both")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--num_draft_tokens", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", "tests.drafters.measured", *given])
    runs: list[dict[str, Any]] = []
    for case in itertools.product(options.prompts, TEMPERATURES, SOURCES):
        runs.append(measured(options, *case))
        options.output.write_text(json.dumps({"command": command, "runs": runs}, indent=1) + "\n")
    return 0


def measured(options: argparse.Namespace, prompts: str, temperature: float, source: str) -> dict[str, Any]:
    """One run, and its counts."""
    is_second, (path, _, num_samples) = prompts.endswith("+"), prompts.rstrip("+").partition(":")
    model = ["--draft", options.draft, "--policy", "fixed"]
    model += ["--num_draft_tokens", str(options.num_draft_tokens)]
    of_source = {
        "draft": model,
        # Lengths by chances alone, not by measured costs.
        "memory": ["--draft", "memory", "--policy", "confidence"],
        "both": [*model, "--memory"],
    }[source]  # fmt: skip
    if source != "draft" and num_samples:
        of_source.append("--memory_rows")
    with contextlib.ExitStack() as stack:
        folder, earlier = (stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        errors = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        words = [
            "--target", options.target, "--prompts", path, "--device", "cpu", "--overlap", "none",
            "--limit", str(options.limit), "--max_new_tokens", str(options.max_new_tokens),
            "--temperature", str(temperature), "--num_samples", num_samples or "1",
        ]  # fmt: skip
        if source != "draft" and is_second:
            assert generate([*words, *model, "--seed", "1", "--output", earlier]) == 0, errors.getvalue()
            of_source += ["--draft_memory", earlier]
        assert generate([*words, *of_source, "--output", folder]) == 0, errors.getvalue()
        shards = [json.loads(each.read_text()) for each in sorted(Path(folder).glob("stats/*.json"))]
    total = {name: sum(shard[name] for shard in shards) for name in COUNTS}
    found = {
        "prompts": Path(path).stem,
        "num_samples": int(num_samples or 1),
        "epoch": 1 + is_second,
        "temperature": temperature,
        "source": source,
        "tokens_per_pass": round(
            (total["num_completion_tokens"] - total["num_completions"]) / total["num_row_steps"], 3
        ),
        **total,
    }
    sys.stderr.write(f"{json.dumps(found)}\n")
    return found


COUNTS = (
    "num_completions", "num_completion_tokens", "num_row_steps", "num_draft_tokens", "num_accepted_tokens",
    "num_memory_tokens", "num_accepted_memory_tokens",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
