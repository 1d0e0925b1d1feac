"""Sweep of ``--overlap auto``: ``python -m tests.lab.plan.sweep [--target 70b --draft 1b ...]``.

Rows are generated in virtual time (``virtual_rounds.py``) with the automatic choice and, beside it, the same
rows with every fixed choice.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdist.policies import (
    Goodput,
)
from specdist.policies.costs import CostModel
from specdist.policies.payoff import RoundChooser, RoundShape
from specdist.utils.table import Table
from tests.lab.plan.virtual_rounds import LONGEST, MAX_DRAFT_TOKENS, SHORTEST, Machine, Setting, Simulation
from tests.ranks import REPOSITORY

FIXED_LENGTHS = (1, 2, 3, 5, 8)
FIXED_BRANCHES = (0, 8)
RESULTS = Path("jobs/benchmarks/rounds-sweep.jsonl")
# What names a pair and its GPUs.
PAIR = ("target", "draft", "gpu", "tp_size")
BATCH_SIZES = (1, 8, 32, 64, 128, 256)
CONTEXTS = (100, 2_000, 8_000, 32_000)
ACCEPTANCES = ((0.3, 0.3), (0.8, 0.8), (0.95, 0.95), (0.3, 0.9), (0.9, 0.3))
# Branches catch less than was assumed.
CATCHING = 0.7
# A seed and the next one stand for the lengths of rows, too.
SEED_STEP = 2


def automatic(machine: Machine, setting: Setting, costs: CostModel | None = None) -> Simulation:
    """``--policy auto --overlap auto``. ``costs``: by which it decides; by default those of the machine."""
    costs = costs or machine.measured(setting.num_slots, setting.context_tokens + (SHORTEST + LONGEST) // 4)
    return Simulation(
        machine,
        setting,
        chooser=RoundChooser(costs, max_draft_tokens=MAX_DRAFT_TOKENS),
        policy=Goodput(max_draft_tokens=MAX_DRAFT_TOKENS, costs=costs, is_coupled=True),
    )


def fixed_choices(machine: Machine, setting: Setting) -> Iterator[tuple[str, Simulation]]:
    """Every choice that stays the same in all rounds."""
    yield "target only", Simulation(machine, setting)
    for length in FIXED_LENGTHS:
        yield (
            f"synchronous K={length}",
            Simulation(machine, setting, shape=RoundShape(drafts_now=True), length=length),
        )
        for count in FIXED_BRANCHES:
            shape = RoundShape(num_ahead=length + 1, num_branches=count)
            name = f"asynchronous K={length} B={count}"
            yield name, Simulation(machine, setting, shape=shape, length=length)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Tokens per second of the automatic choice, of the target alone and of the best fixed choice."""

    setting: Setting
    automatic: float
    target_only: float
    best: float
    best_name: str
    shapes: dict[str, int]


def compare(machine: Machine, setting: Setting, num_seeds: int) -> Found:
    """The means over so many seeds, the same ones for every choice."""
    sums: dict[str, float] = {}
    shapes: dict[str, int] = {}
    for seed in range(num_seeds):
        seeded = dataclasses.replace(setting, seed=SEED_STEP * seed)
        chosen = automatic(machine, seeded)
        for name, simulation in (("auto", chosen), *fixed_choices(machine, seeded)):
            sums[name] = sums.get(name, 0.0) + simulation.run() / num_seeds
        for shape, count in chosen.shapes.items():
            shapes[shape] = shapes.get(shape, 0) + count
    found = sums.pop("auto")
    best = max(sums, key=lambda name: sums[name])
    return Found(
        setting=setting,
        automatic=found,
        target_only=sums["target only"],
        best=sums[best],
        best_name=best,
        shapes=dict(sorted(shapes.items(), key=lambda item: -item[1])[:4]),
    )


def settings() -> Iterator[Setting]:
    """Batch sizes, contexts and acceptance rates."""
    for num_slots, context, acceptance in itertools.product(BATCH_SIZES, CONTEXTS, ACCEPTANCES):
        yield Setting(num_slots=num_slots, context_tokens=context, acceptance=acceptance, catching=CATCHING)


def markdown() -> str:
    """The tables of the results that are kept."""
    found = read(REPOSITORY / RESULTS)
    parts = []
    for pair in dict.fromkeys(tuple(one[name] for name in PAIR) for one in found):
        results = {key_of(one)[len(PAIR) :]: one for one in found if key_of(one)[: len(PAIR)] == pair}
        rows = [
            {
                "batch": str(num_slots),
                "context": f"{context:,}",
                **{
                    _acceptance_text(*acceptance): _cell(results.get((num_slots, context, *acceptance)))
                    for acceptance in ACCEPTANCES
                },
            }
            for num_slots, context in itertools.product(BATCH_SIZES, CONTEXTS)
        ]
        worst = min(results.values(), key=lambda one: one["automatic"] / one["best"])
        least = min(per_gpu(one) for one in results.values())
        parts += [
            f"{pair[0]} with {pair[1]} on {pair[2]}, tp_size {pair[3]}: per GPU at least "
            f"{least:.2f} of the target alone, which has no GPU for a draft, and at least "
            f"{worst['automatic'] / worst['best']:.2f} of the best fixed choice "
            f"(batch {worst['num_slots']}, context {worst['context_tokens']:,}, acceptance "
            f"{_acceptance_text(*worst['acceptance'])}).",
            Table.of(rows, num_names=0).markdown(),
        ]
    return "\n\n".join(parts)


def _acceptance_text(first: float, second: float) -> str:
    return f"{first:g}" if first == second else f"{first:g}, then {second:g}"


def _cell(found: dict[str, Any] | None) -> str:
    """A dash for what was not simulated."""
    return "-" if found is None else f"{per_gpu(found):.2f} ({found['automatic'] / found['best']:.2f})"


def per_gpu(found: dict[str, Any]) -> float:
    """Tokens/s over those of the target alone, each per GPU: the draft has one more."""
    ratio: float = found["automatic"] / found["target_only"]
    return ratio * found["tp_size"] / (found["tp_size"] + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="70b")
    parser.add_argument("--draft", default="1b")
    parser.add_argument("--gpu", default="h100-sxm")
    parser.add_argument("--tp_size", type=int, default=4)
    parser.add_argument("--output", type=Path, default=REPOSITORY / RESULTS)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=BATCH_SIZES)
    parser.add_argument("--seeds", type=int, default=2, help="runs of every choice, of which the mean counts")
    options = parser.parse_args()
    pair = {name: getattr(options, name) for name in PAIR}
    machine = Machine.of(**pair)
    kept = {key_of(one): one for one in read(options.output)}
    for setting in settings():
        if setting.num_slots not in options.batch_sizes:
            continue
        found = compare(machine, setting, options.seeds)
        one = {
            **pair,
            **dataclasses.asdict(setting),
            "num_seeds": options.seeds,
            **{name: round(getattr(found, name), 1) for name in ("automatic", "target_only", "best")},
            "best_name": found.best_name,
            "shapes": found.shapes,
        }
        kept[key_of(one)] = one
        sys.stderr.write(f"{setting} {_cell(one)} {found.best_name} {found.shapes}\n")
        lines = [json.dumps(kept[key]) for key in sorted(kept)]
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read(path: Path) -> list[dict[str, Any]]:
    """One setting a line; nothing if there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def key_of(one: dict[str, Any]) -> tuple[Any, ...]:
    """The pair, and the setting."""
    return *(one[name] for name in PAIR), one["num_slots"], one["context_tokens"], *one["acceptance"]


if __name__ == "__main__":
    main()
