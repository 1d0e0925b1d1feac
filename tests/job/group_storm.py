"""Target groups and their shared drafts that are killed and stopped at random moments.

    python -m tests.job.group_storm --kills 100 --stops 100

launches two target groups and a draft (or more: ``--targets``, ``--drafts``), and SIGKILLs or SIGSTOPs one of
them after the other until so many were, in one run after another. Every complete run is compared with an
undisturbed one of a single process: byte by byte under rejection, where groups wait for a draft; else all but
the counts of drafted tokens, which are fewer where a group has decoded alone. The suite runs a short version.
``--output`` is written after every run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.forked import World
from tests.job.launching import read_output, run_here, shard_bytes
from tests.job.pair import build_pair
from tests.job.ranks import started_ranks

# Shards of three rows, few at a time: groups take turns, and meet. A second of silence counts as the end.
SHARED: dict[str, Any] = {
    "rows_per_shard": 3,
    "num_samples": 4,
    "max_num_seqs": 2,
    "max_new_tokens": 48,
    "claim_timeout": 1,
    "device": "cpu",
    # Sums in another order move the borders between tokens.
    "model_impl": "transformers",
}
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "gumbel": {"temperature": 1, "acceptance": "gumbel"},
    "rejection": {"temperature": 1, "top_p": 0.9},
}
LAUNCH_ONLY: dict[str, Any] = {"draft_timeout": 1.5, "max_restarts": 1000}
# What the draft has done for a row.
COUNTS = ["num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "mean_acceptance_length"]
MAX_LIFE_S = 1.5
MAX_PAUSE_S = 4.0
TIMEOUT_S = 300


@dataclass
class Storm:
    """What is still to be done, and what was: by signal and kind of part."""

    num_kills: int
    num_stops: int
    rng: random.Random
    done: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def is_over(self) -> bool:
        return not self.num_kills and not self.num_stops

    def strike(self, world: World, num_targets: int, only: str | None) -> None:
        """Kill or stop the process of one part."""
        kinds = ["target"] * num_targets + ["draft"] * (len(world.processes) - num_targets)
        ranks = [rank for rank, kind in enumerate(kinds) if only in (None, kind)]
        rank = self.rng.choice(ranks)
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            children = psutil.Process(world.processes[rank].pid).children()
            if not children or children[0].status() == psutil.STATUS_ZOMBIE:
                return
            kill = self.rng.random() * (self.num_kills + self.num_stops) < self.num_kills
            if kill:
                children[0].kill()
                self.num_kills -= 1
            else:
                os.kill(children[0].pid, signal.SIGSTOP)
                self.num_stops -= 1
            self.done["killed" if kill else "stopped", kinds[rank]] += 1
            if not kill:
                # Its supervisor may end it before it goes on.
                time.sleep(self.rng.random() * MAX_PAUSE_S)
                os.kill(children[0].pid, signal.SIGCONT)


def storm_through(
    output: Path,
    options: dict[str, Any],
    storm: Storm,
    *,
    num_targets: int,
    num_drafts: int,
    only: str | None = None,
) -> str:
    """One run to its end, under the storm; what its ranks have logged."""
    launch = LAUNCH_ONLY | {"num_targets": num_targets, "num_drafts": num_drafts}
    with started_ranks(num_targets + num_drafts, **options, **launch, output=output) as world:
        while not storm.is_over and world.is_running():
            time.sleep(storm.rng.random() * MAX_LIFE_S)
            storm.strike(world, num_targets, only)
        code = world.end(TIMEOUT_S)
        words = "\n---\n".join(world.words("stderr"))
    assert code == 0, f"exit code {code}\n{words}"
    return words


def check_same(output: Path, expected: Path, rule: str) -> None:
    """See the module."""
    if rule == "rejection":
        assert shard_bytes(output) == shard_bytes(expected), f"{rule}: other bytes"
    rows, expected_rows = (read_output(path).drop_columns(COUNTS) for path in (output, expected))
    assert rows.equals(expected_rows), f"{rule}: other rows"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--stops", type=int, default=100)
    parser.add_argument("--targets", type=int, default=2)
    parser.add_argument("--drafts", type=int, default=1)
    parser.add_argument("--only", choices=["target", "draft"])
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--overlap", default="none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file for what was done")
    chosen = parser.parse_args()
    storm = Storm(chosen.kills, chosen.stops, random.Random(chosen.seed))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pair = build_pair(folder / "pair")
        common = SHARED | {"prompts": pair.prompts, "target": pair.target, "draft": pair.draft}
        num_runs = 0
        runs: Counter[str] = Counter()
        while not storm.is_over:
            rule = chosen.rules[num_runs % len(chosen.rules)]
            options = common | RULES[rule] | {"overlap": chosen.overlap}
            expected = folder / f"undisturbed-{rule}"
            if not expected.exists():
                # With the draft beside it, as ahead needs a rank for it.
                if chosen.overlap == "ahead" and rule == "rejection":
                    calm = Storm(0, 0, storm.rng)
                    storm_through(
                        expected,
                        options,
                        calm,
                        num_targets=1 + (chosen.drafts == 1),
                        num_drafts=chosen.drafts,
                    )
                else:
                    assert run_here(**options | {"overlap": "none"}, output=expected).code == 0
            output = folder / f"run-{num_runs}"
            storm_through(
                output, options, storm, num_targets=chosen.targets, num_drafts=chosen.drafts, only=chosen.only
            )
            check_same(output, expected, rule)
            num_runs += 1
            runs[rule] += 1
            if chosen.output is not None:
                write_result(chosen, storm, runs)
            print(f"{num_runs} runs, the last {rule}: {dict(storm.done)}: every row the same", flush=True)  # noqa: T201


def write_result(chosen: argparse.Namespace, storm: Storm, runs: Counter[str]) -> None:
    """All runs so far were the same as undisturbed ones."""
    result = {
        "command": f"python -m tests.job.group_storm {shlex.join(sys.argv[1:])}",
        "targets": chosen.targets,
        "drafts": chosen.drafts,
        "overlap": chosen.overlap,
        "runs": dict(runs),
        "strikes": [
            {"signal": {"killed": "SIGKILL", "stopped": "SIGSTOP"}[what], "part": kind, "number": number}
            for (what, kind), number in sorted(storm.done.items())
        ],
        "left": {"SIGKILL": storm.num_kills, "SIGSTOP": storm.num_stops},
    }
    chosen.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
