"""Counts what the device is given, on a fake one: kernels, copies, synchronisations, replays, bytes.

    python -m tests.gpu.counts                       everything, a quarter of an hour
    python -m tests.gpu.counts --fast                one family, a few policies, one batch size, one shape
    python -m tests.gpu.counts --only kernels bytes  some of the sections
    python -m tests.gpu.counts --output jobs/benchmarks/device-counts.json

The last line on stdout is a JSON document. With ``--output`` it becomes the entry ``--name`` (``after``, or
``before`` on an earlier commit) of that file, which the table in ``jobs/benchmarks/tables`` shows
(``python -m tests.readme`` writes it), and ``after`` also becomes what the planner reckons with.

- ``kernels_per_layer``: of a replayed pass, by family of models; ``kernels_of_pass``: also those outside of
  layers, and those that are launched one by one.
- ``syncs_per_round``: waits of the host for the device by side, acceptance rule and policy, in steady rounds
  of four rows and at most four draft tokens, both models in one process. ``rounds`` has the most of them in
  one round, and what else a round takes.
- ``replay_share``: by policy and number of sequences, at most 20 draft tokens, in the last of
  four runs; the others have recorded most of its shapes.
- ``bytes_over_floor``: see traffic.py for what is counted as moved; the floor is weights plus live cache.

Nothing here is a time, and nothing was measured on a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdist.models.passes import graphs
from tests.gpu import device
from tests.ranks import REPOSITORY

SECTIONS = ("kernels", "syncs", "replays", "bytes")
NUM_SEQUENCES = (1, 8, 32, 128)
COUNTED = REPOSITORY / "jobs/benchmarks/device-counts.json"
PLANNED = REPOSITORY / "specdist/lab/plan/counted.json"
FAST_POLICIES = ("fixed", "confidence")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.counts", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="these sections")
    parser.add_argument("--fast", action="store_true", help="a small part of every section")
    parser.add_argument("--policies", nargs="+", help="these policies")
    parser.add_argument("--num_sequences", nargs="+", type=int, default=list(NUM_SEQUENCES))
    parser.add_argument("--output", type=Path, help="file of counts to write the entry into")
    parser.add_argument("--name", choices=("before", "after"), default="after", help="of the entry")
    return parser.parse_args(arguments)


def count(options: argparse.Namespace) -> dict[str, Any]:
    """The document, on a device that is installed."""
    from tests.gpu import counting
    from tests.gpu.policies import policies
    from tests.models.families import FAMILIES

    found: dict[str, Any] = {}
    families = ["llama"] if options.fast else list(FAMILIES)
    shapes = {"1B": counting.SHAPES["1B"]} if options.fast else counting.SHAPES
    names = list(policies(1))
    names = options.policies or (list(FAST_POLICIES) if options.fast else names)
    sizes = [8] if options.fast else options.num_sequences
    if "kernels" in options.only:
        found["kernels_of_pass"] = {family: counting.kernels_of_family(family) for family in families}
        found["kernels_per_layer"] = {
            family: counts["per_layer"] for family, counts in found["kernels_of_pass"].items()
        }
    if "syncs" in options.only:
        rules = ["greedy", "rejection"] if options.fast else list(counting.RULES)
        found |= _syncs(rules, names)
    if "replays" in options.only:
        found["replay_share"] = _replays(sizes, names[-1:] if options.fast else names)
    if "bytes" in options.only:
        passes = {"step": 1, "block": counting.BLOCK_TOKENS}
        found["bytes_of_pass"] = {
            name: counting.bytes_of_shape(shape, passes) for name, shape in shapes.items()
        }
        found["bytes_over_floor"] = {
            shape: {kind: counts["ratio"] for kind, counts in kinds.items()}
            for shape, kinds in found["bytes_of_pass"].items()
        }
    return found


def _syncs(rules: list[str], names: list[str]) -> dict[str, Any]:
    from tests.gpu import counting
    from tests.gpu.policies import READS_HEAD, policies

    rounds: dict[str, Any] = {}
    for has_head in (False, True):
        own = [name for name in names if (name in READS_HEAD) == has_head]
        if not own:
            continue
        for rule in rules:
            # Graphs of other rules would take the room for this one's.
            runs = counting.Runs(
                num_rows=counting.NUM_ROWS,
                cap=counting.NUM_DRAFT_TOKENS,
                num_new_tokens=counting.NUM_NEW_TOKENS,
                has_head=has_head,
            )
            for name in own:
                policy = policies(counting.NUM_DRAFT_TOKENS)[name]
                rounds.setdefault(rule, {})[name] = counting.steady_rounds(runs, rule, policy)
                note(f"synchronisations: {rule}, {name}")
    syncs = {
        side: {
            rule: {name: round_[side]["synchronisations"] for name, round_ in of_rule.items()}
            for rule, of_rule in rounds.items()
        }
        for side in counting.SIDES
    }
    return {"syncs_per_round": syncs, "rounds": rounds}


def _replays(sizes: list[int], names: list[str]) -> dict[str, Any]:
    from tests.gpu import counting
    from tests.gpu.policies import READS_HEAD, policies

    found: dict[str, Any] = {}
    for name in names:
        for num_rows in sizes:
            # A new engine each: graphs of one policy's run would serve the next.
            runs = counting.Runs(
                num_rows=num_rows,
                cap=counting.MAX_DRAFT_TOKENS,
                num_new_tokens=counting.NUM_RUN_TOKENS,
                has_head=name in READS_HEAD,
            )
            policy = policies(counting.MAX_DRAFT_TOKENS)[name]
            found.setdefault(name, {})[str(num_rows)] = counting.replay_share(runs, policy)
            note(f"replays: {name}, {num_rows} sequences")
    return found


def note(words: str) -> None:
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()


def planned(found: dict[str, Any]) -> dict[str, Any]:
    """What the planner reckons with, by side: a round of the rejection rule with fixed lengths."""
    from tests.gpu import counting

    of_pass = found["kernels_of_pass"]["llama"]
    of_layers = counting.NUM_LAYERS * of_pass["per_layer"]
    # Of a whole model: shards of one have fewer.
    shape = "8B" if "8B" in found["bytes_of_pass"] else "1B"
    other_bytes = found["bytes_of_pass"][shape]["block"]["other_bytes_per_token_and_layer"]
    sides = {}
    for side, counts in found["rounds"]["rejection"]["fixed"].items():
        sides[side] = {
            "kernels_per_layer": of_pass["per_layer"],
            "kernels_outside_of_layers": round(counts["replayed kernels"] / counts["passes"] - of_layers, 2),
            **{
                name.replace(" ", "_"): round(counts[name] / counts["passes"], 2)
                for name in ("eager kernels", "copies", "replays", "synchronisations")
            },
            "tensors_per_layer": round(other_bytes / (2 * counting.SHAPES[shape].hidden_size), 1),
        }
    return sides


def write(path: Path, name: str, found: dict[str, Any]) -> None:
    """Into the file of counts, and where the planner reads."""
    entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True
    )
    run = {
        "command": " ".join(["python", "-m", "tests.gpu.counts", *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    entries[name] = _merged(entries.get(name, {}), run | found)
    path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    complete = {"kernels_of_pass", "rounds", "bytes_of_pass"} <= entries[name].keys()
    if name == "after" and complete and path.resolve() == COUNTED:
        PLANNED.write_text(json.dumps(planned(entries[name]), indent=2) + "\n", encoding="utf-8")


def _merged(old: Any, new: Any) -> Any:
    """What was counted anew takes the place of what was there; the rest stays."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: _merged(old.get(key), value) for key, value in new.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    reason = device.why_not()
    if reason is not None:
        note(f"no device can be faked here: {reason}")
        return 1
    device.prepare()
    device.install(graphs.NUM_WARMUPS)
    found = count(options)
    if options.output is not None:
        write(options.output, options.name, found)
    sys.stdout.write(f"{json.dumps(found)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
