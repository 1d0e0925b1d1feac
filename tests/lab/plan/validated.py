"""The planner against the engine: ``python -m tests.lab.plan.validated [--parts emulated wall_clock]``.

*Emulated*: the planner's steady state beside the real engine, draft and scheduler in virtual time
(:mod:`tests.lab.emulation.virtual`), with its times of passes and of hosts and messages in both. *Wall
clock*: what ``tests.lab.plan.validate`` finds for a pair on this machine, on which nothing else should run.
*CPU time*: the same with the time that the process has used, which is what a clock would show if nothing else
ran: with one thread it waits for nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

import torch

from specdist.data.leases.heartbeat import now_utc
from specdist.data.store.files import write_json
from specdist.lab.plan.simulate import OWN_GPU, Settings, predict
from specdist.policies.choice import PolicyChoice
from specdist.policies.formulas import caught_share
from specdist.utils.table import Table
from tests.lab.emulation.config import MODE_OPTIONS, EmulationConfig
from tests.lab.emulation.run import Case, Emulation
from tests.lab.emulation.virtual import MESSAGE_NS, ROUND_NS, SYNCHRONOUS_NS, tokens_per_s
from tests.lab.plan.validate import ValidationConfig, validate
from tests.ranks import REPOSITORY

RESULTS = REPOSITORY / "jobs/benchmarks/plan-validated.json"
PARTS = EMULATED, WALL_CLOCK, CPU_TIME = "emulated", "wall_clock", "cpu_time"
NEAR = 0.15
BATCH_SIZES, LENGTHS = (1, 8, 32), (3, 5)
MODES = ("target_only", "colocated", "synchronous", "asynchronous", "branches")
# Rounds of a run: at batch 1 one more prompt is a larger part of the time.
ROUNDS = {1: 300, 8: 160, 32: 100}
EMULATED_PAIR: dict[str, Any] = {
    "emulate": "h100-sxm", "target": "70b", "draft": "1b", "tp_size": 4, "acceptance": 0.8,
    "prompt_tokens": 250, "output_tokens": 250,
}  # fmt: skip
CLOCKS = ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns")
PAIR: dict[str, Any] = {
    "target": "runs/small-pair/target", "draft": "runs/small-pair/draft_distilled",
    "prompt_tokens": 64, "output_tokens": 64, "repeats": 5,
}  # fmt: skip


def emulated(batch_size: int, mode: str, length: int) -> dict[str, Any]:
    """One case: predicted and found tokens per second."""
    config = EmulationConfig(**EMULATED_PAIR, batch_sizes=[batch_size], rounds=ROUNDS[batch_size])
    choice = PolicyChoice.of("fixed", num_draft_tokens=length) if length else PolicyChoice()
    emulation = Emulation(config)
    case = Case(batch_size=batch_size, mode=MODE_OPTIONS[mode], choice=choice)
    ahead = emulation.order(case).assembly.ahead
    proposal_ns = (case.mode in OWN_GPU) * MESSAGE_NS + (mode == "synchronous") * SYNCHRONOUS_NS
    costs = dataclasses.replace(emulation.costs(case), round_s=ROUND_NS / 1e9, proposal_s=proposal_ns / 1e9)
    settings = Settings(
        mode=case.mode,
        num_rows=batch_size,
        num_draft_tokens=ahead.num_ahead - 1 if ahead.num_ahead else length,
        acceptance=config.acceptance,
        caught=caught_share(ahead.num_branches),
    )
    lengths = {"prompt_tokens": config.prompt_tokens, "output_tokens": config.output_tokens}
    return {
        "batch_size": batch_size,
        "mode": mode,
        "num_draft_tokens": length,
        "predicted_tokens_per_s": round(predict(costs, settings, **lengths).tokens_per_s, 1),
        "found_tokens_per_s": round(tokens_per_s(config, mode, choice), 1),
    }


def all_emulated() -> list[dict[str, Any]]:
    return [
        emulated(batch_size, mode, length)
        for batch_size in BATCH_SIZES
        for mode in MODES
        for length in (LENGTHS if mode != MODES[0] else (0,))
    ]


def by_cpu_time() -> list[dict[str, Any]]:
    """All clocks of this process are set to the time that it has used."""
    torch.set_num_threads(1)
    before = {name: getattr(time, name) for name in CLOCKS}
    for name in CLOCKS:
        setattr(time, name, time.process_time_ns if name.endswith("_ns") else time.process_time)
    try:
        return on_wall_clock()
    finally:
        for name, clock in before.items():
            setattr(time, name, clock)


def on_wall_clock() -> list[dict[str, Any]]:
    config = ValidationConfig(**PAIR, device="cpu", batch_sizes=[1, 4, 8], draft_lengths=list(LENGTHS))
    return [{**dataclasses.asdict(one), "error": one.error} for one in validate(config)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=(EMULATED, CPU_TIME))
    options = parser.parse_args()
    result = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    command = " ".join(["python -m tests.lab.plan.validated", *sys.argv[1:]])
    for part in options.parts:
        measure = {EMULATED: all_emulated, WALL_CLOCK: on_wall_clock, CPU_TIME: by_cpu_time}[part]
        result[part] = {"command": command, "date": now_utc(), "found": measure()}
        write_json(RESULTS, result)


def markdown() -> str:
    """Both parts, each with how many predictions are near enough."""
    result = json.loads(RESULTS.read_text(encoding="utf-8"))
    parts = []
    if EMULATED in result:
        rows = [
            {
                "sequences": str(one["batch_size"]),
                "mode": one["mode"].replace("_", " "),
                "K": str(one["num_draft_tokens"]),
                "engine": f"{one['found_tokens_per_s']:,.0f}",
                "planner": f"{one['predicted_tokens_per_s']:,.0f}",
                "error": f"{_emulated_error(one):+.1%}",
            }
            for one in result[EMULATED]["found"]
        ]
        errors = [_emulated_error(one) for one in result[EMULATED]["found"]]
        parts += [_near("In virtual time", errors), Table.of(rows, num_names=2).markdown()]
    for part, where in ((WALL_CLOCK, "By wall clock on a CPU"), (CPU_TIME, "By CPU time of one thread")):
        if part not in result:
            continue
        found = result[part]["found"]
        rows = [
            {
                "sequences": str(one["num_rows"]),
                "K": str(one["num_draft_tokens"]),
                "error": f"{one['error']:+.1%}",
                "against each repeat": ", ".join(
                    f"{one['predicted_tokens_per_s'] / measured - 1:+.1%}"
                    for measured in one["measured_tokens_per_s"]
                ),
            }
            for one in found
        ]
        parts += [
            _near(f"{where}, the small pair", [one["error"] for one in found]),
            Table.of(rows, num_names=0).markdown(),
        ]
    return "\n\n".join(parts)


def _emulated_error(one: dict[str, Any]) -> float:
    return float(one["predicted_tokens_per_s"] / one["found_tokens_per_s"] - 1)


def _near(where: str, errors: list[float]) -> str:
    num_near = sum(abs(error) <= NEAR for error in errors)
    return (
        f"{where}: {num_near} of {len(errors)} predictions within {NEAR:.0%}, "
        f"the worst {max(errors, key=abs):+.1%}."
    )


if __name__ == "__main__":
    main()
