"""Tokens per target pass, and per second, by the source of the candidates: a draft model, or n-grams.

    python -m tests.policies.ngrams.measured --target LARGE --draft SMALL --prompts FILE ... --output
    FILE.json

Every run is one of `jobs/generate.py` on one rank, with blocks of a fixed number of draft tokens, so that
no count depends on the machine. FILE:SAMPLES are several samples of each row, where n-grams of the other
rows are looked up, too; FILE+ is a second epoch, with n-grams of another run's completions of the same
prompts. Sources take turns, --repeats times, so that whatever else the machine does
falls on all alike. The same command goes on after the last run that an interrupted one has written.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specdist.cli import generate

TEMPERATURES = (0.0, 0.6, 1.0)
SOURCES = ("draft", "ngram")
NS_PER_S = 10**9
Run = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--num_draft_tokens", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", "tests.policies.ngrams.measured", *given])
    runs = begun(options.output, command)
    cases = itertools.product(options.prompts, TEMPERATURES)
    with tempfile.TemporaryDirectory() as folder:
        for number, (prompts, temperature) in enumerate(cases):
            known = functools.cache(
                functools.partial(earlier, options, prompts, temperature, Path(folder) / str(number))
            )
            for repeat, source in itertools.product(range(options.repeats), SOURCES):
                name = named(prompts, temperature, source)
                run = next((run for run in runs if run.items() >= name.items()), None)
                if run is None:
                    runs.append(run := name | {"wall_s": []})
                if len(run["wall_s"]) > repeat:
                    continue
                measure(options, run, prompts, known)
                options.output.write_text(json.dumps({"command": command, "runs": runs}, indent=1) + "\n")
    return 0


def begun(output: Path, command: str) -> list[Run]:
    """What the same command has written already, with times."""
    found = json.loads(output.read_text()) if output.is_file() else {}
    return [run for run in found["runs"] if "wall_s" in run] if found.get("command") == command else []


def named(prompts: str, temperature: float, source: str) -> Run:
    path, _, num_samples = prompts.rstrip("+").partition(":")
    return {
        "prompts": Path(path).stem,
        "num_samples": int(num_samples or 1),
        "epoch": 1 + prompts.endswith("+"),
        "temperature": temperature,
        "source": source,
    }


def earlier(options: argparse.Namespace, prompts: str, temperature: float, folder: Path) -> Path:
    """A run over the same prompts with another seed."""
    words = [*common(options, prompts, temperature), *model(options)]
    generated([*words, "--seed", "1", "--output", str(folder)])
    return folder


def measure(options: argparse.Namespace, run: Run, prompts: str, known: Callable[[], Path]) -> None:
    """Once more: its counts, which are the same every time, and its seconds."""
    of_source = {
        "draft": model(options),
        # Lengths by chances alone, not by measured costs.
        "ngram": ["--draft", "ngram", "--policy", "confidence"],
    }[run["source"]]
    if run["source"] != "draft" and run["num_samples"] > 1:
        of_source.append("--ngram_rows")
    if run["source"] != "draft" and run["epoch"] > 1:
        of_source += ["--ngram_texts", str(known())]
    with tempfile.TemporaryDirectory() as folder:
        generated([*common(options, prompts, run["temperature"]), *of_source, "--output", folder])
        shards = [json.loads(each.read_text()) for each in sorted(Path(folder).glob("stats/*.json"))]
    total = {name: sum(shard[name] for shard in shards) for name in COUNTS}
    num_after_first = total["num_completion_tokens"] - total["num_completions"]
    total["tokens_per_pass"] = round(num_after_first / total["num_row_steps"], 3)
    assert run.items() >= total.items() or not run["wall_s"], (run, total)
    run.update(total)
    run["wall_s"].append(round(sum(shard["wall_ns"] for shard in shards) / NS_PER_S, 4))
    sys.stderr.write(f"{json.dumps(run)}\n")


def common(options: argparse.Namespace, prompts: str, temperature: float) -> list[str]:
    path, _, num_samples = prompts.rstrip("+").partition(":")
    return [
        "--target", options.target, "--prompts", path, "--device", "cpu", "--overlap", "synchronous",
        "--limit", str(options.limit), "--max_new_tokens", str(options.max_new_tokens),
        "--temperature", str(temperature), "--num_samples", num_samples or "1",
    ]  # fmt: skip


def model(options: argparse.Namespace) -> list[str]:
    return [
        "--draft",
        options.draft,
        "--policy",
        "fixed",
        "--num_draft_tokens",
        str(options.num_draft_tokens),
    ]


def generated(words: Sequence[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        assert generate(list(words)) == 0, errors.getvalue()


COUNTS = (
    "num_completions", "num_completion_tokens", "num_row_steps", "num_draft_tokens", "num_accepted_tokens",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
