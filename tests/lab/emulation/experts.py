"""Mixtures of experts in virtual time: `python -m tests.lab.emulation.experts --output FILE`, a quarter of an
hour.

As in :mod:`tests.lab.emulation.policies`: the engine, the draft and the policy are real, and passes take the
planner's times, by the distinct experts that their tokens are expected to choose. What is in the file stays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from specdist.data.leases.heartbeat import now_utc
from specdist.data.store.files import write_json
from specdist.lab.plan.hardware import PUBLISHED
from specdist.lab.plan.shapes import MIXTURES
from specdist.policies.choice import PolicyChoice
from specdist.utils.table import Table
from tests.lab.emulation.config import EmulationConfig
from tests.lab.emulation.virtual import tokens_per_s

RESULT = Path(__file__).parents[3] / "jobs/benchmarks/experts-emulated.json"
TP_SIZES, BATCH_SIZES, ACCEPTANCES = (1, 2), (1, 8, 32, 64, 128, 256), (0.3, 0.8)
ALONE, FIXED, SHARED, CHOSEN = "target only", "K = 5, colocated", "goodput, colocated", "goodput, auto"
METHODS = {
    ALONE: ("colocated", PolicyChoice()),
    FIXED: ("colocated", PolicyChoice.of("fixed", num_draft_tokens=5)),
    SHARED: ("colocated", PolicyChoice.of("goodput")),
    CHOSEN: ("auto", PolicyChoice.of("goodput")),
}
Setting = tuple[str, int, int, float]


def num_rounds(batch_size: int) -> int:
    """Few sequences take more of them to learn what is accepted."""
    return 300 if batch_size == 1 else 100 if batch_size <= 32 else 50


def rates(setting: Setting, methods: tuple[str, ...] = tuple(METHODS)) -> dict[str, float]:
    """Tokens per second of each method."""
    target, tp_size, batch_size, acceptance = setting
    config = EmulationConfig(
        emulate="h100-sxm",
        target=target,
        draft="0.5b",
        tp_size=tp_size,
        acceptance=acceptance,
        batch_sizes=[batch_size],
        rounds=num_rounds(batch_size),
        prompt_tokens=256,
        output_tokens=256,
    )
    return {name: round(tokens_per_s(config, *METHODS[name]), 1) for name in methods}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the result")
    parser.add_argument("--targets", nargs="+", choices=MIXTURES, default=list(MIXTURES))
    parser.add_argument("--batch_sizes", nargs="+", type=int, default=BATCH_SIZES)
    parser.add_argument("--again", nargs="+", choices=METHODS, help="measure these again; others stay")
    options = parser.parse_args()
    found = json.loads(options.output.read_text(encoding="utf-8")) if options.output.is_file() else {}
    settings = {key_of(one): one for one in found.get("settings", [])}
    wanted = itertools.product(options.batch_sizes, options.targets, TP_SIZES, ACCEPTANCES)
    for batch_size, target, tp_size, acceptance in wanted:
        key = target, tp_size, batch_size, acceptance
        known = settings.get(key, {}).get("tokens_per_s", {})
        methods = tuple(name for name in METHODS if name not in known or name in (options.again or ()))
        if not methods:
            continue
        names = ("target", "tp_size", "batch_size", "acceptance")
        found = {**known, **rates(key, methods)}
        settings[key] = {**dict(zip(names, key, strict=True)), "tokens_per_s": found}
        sys.stderr.write(f"{settings[key]}\n")
        result = {
            "command": "python " + " ".join(["-m", "tests.lab.emulation.experts", *sys.argv[1:]]),
            "date": now_utc(),
            "settings": [settings[each] for each in sorted(settings)],
        }
        write_json(options.output, result)


def key_of(setting: dict[str, Any]) -> Setting:
    return setting["target"], setting["tp_size"], setting["batch_size"], setting["acceptance"]


def markdown(path: Path = RESULT) -> str:
    """A row per setting: rates over that of the target alone, which has no GPU for a draft."""
    result = json.loads(path.read_text(encoding="utf-8"))
    rows: list[dict[str, str | int | None]] = []
    for one in result["settings"]:
        found = one["tokens_per_s"]
        rows.append(
            {
                "target": one["target"],
                "its GPUs": str(one["tp_size"]),
                "acceptance": f"{one['acceptance']:g}",
                "sequences": one["batch_size"],
                "alone, tokens/s": f"{found[ALONE]:,.0f}",
                **{name: f"{found[name] / found[ALONE]:.2f}" for name in (FIXED, SHARED, CHOSEN)},
            }
        )
    parts = [Table.of(rows, num_names=3).markdown(), f"Figures of the GPU: {PUBLISHED}."]
    return "\n\n".join([*parts, f"{result['date']}: `{result['command']}`"])


if __name__ == "__main__":
    main()
