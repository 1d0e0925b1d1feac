"""Where the draft should be: ``python -m tests.lab.emulation.placements``.

The engine in virtual time (:mod:`tests.lab.emulation.virtual`) with the default policy, at sizes of batches
for which memory has room: the target alone, the draft on its rank 0, and on a GPU of its own, which counts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

from specdist.data.leases.heartbeat import now_utc
from specdist.data.store.files import write_json
from specdist.lab.plan.hardware import GPUS
from specdist.lab.plan.job import open_model
from specdist.lab.plan.memory import fit
from specdist.lab.plan.roofline import DEFAULTS
from specdist.lab.plan.simulate import Mode
from specdist.policies.choice import PolicyChoice
from specdist.utils.table import Table
from tests.lab.emulation.config import MODE_OPTIONS, EmulationConfig
from tests.lab.emulation.virtual import tokens_per_s

RESULTS = Path(__file__).parents[3] / "jobs/benchmarks/placements-70b-h100.json"
BATCH_SIZES = (1, 8, 32, 64, 128, 256, 512)
# Rounds of a run: at batch 1 one more prompt is a larger part of the time.
ROUNDS, MANY_ROUNDS = {1: 300, 8: 160}, 100
PLACES = {"target_only": "target only", "colocated": "shared", "auto": "own GPU"}
# The target's numbers and ranks.
PRECISIONS: dict[str, tuple[Literal["float8"] | None, int]] = {"bfloat16": (None, 4), "FP8": ("float8", 2)}
GIVEN: dict[str, Any] = {
    "emulate": "h100-sxm", "target": "70b", "draft": "1b", "acceptance": 0.8, "prompt_tokens": 1000,
    "output_tokens": 500,
}  # fmt: skip


def most_rows(precision: str, mode: str) -> int:
    """Sequences of a mean context that memory has room for: they are at all lengths at a time."""
    quantization, tp_size = PRECISIONS[precision]
    target, _ = open_model("--target", GIVEN["target"], "bfloat16", quantization=quantization)
    draft, _ = open_model("--draft", GIVEN["draft"], "bfloat16")
    tokens = GIVEN["prompt_tokens"] + GIVEN["output_tokens"] // 2
    planned: Mode = "branches" if mode == "auto" else MODE_OPTIONS[mode]
    found = fit(
        target, draft, GPUS[GIVEN["emulate"]], planned, tp_size=tp_size, row_tokens=tokens, settings=DEFAULTS,
        num_draft_tokens=1,
    )  # fmt: skip
    return found.most_rows


def per_gpu(mode: str, batch_size: int, **options: Any) -> float:
    """Tokens per second and GPU of the default policy; ``options``: of the emulation."""
    config = EmulationConfig(**options, batch_sizes=[batch_size], rounds=ROUNDS.get(batch_size, MANY_ROUNDS))
    choice = PolicyChoice() if mode == "target_only" else PolicyChoice.of("goodput")
    has_own_gpu = mode not in ("target_only", "colocated")
    return tokens_per_s(config, mode, choice) / (config.tp_size + has_own_gpu)


def measure() -> list[dict[str, Any]]:
    found = []
    for precision, (quantization, tp_size) in PRECISIONS.items():
        for mode in PLACES:
            most = most_rows(precision, mode)
            for batch in BATCH_SIZES:
                if batch > most:
                    continue
                rate = per_gpu(mode, batch, **GIVEN, tp_size=tp_size, target_quantization=quantization)
                found.append(
                    {"precision": precision, "mode": mode, "batch_size": batch, "per_gpu": round(rate, 2)}
                )
                sys.stderr.write(f"{found[-1]}\n")
    return found


def given() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))["given"]


def found_rates() -> dict[tuple[str, str, int], float]:
    """Tokens per second and GPU by precision, mode and batch size."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))["found"]
    return {(one["precision"], one["mode"], one["batch_size"]): one["per_gpu"] for one in found}


def worth_its_gpu() -> dict[str, int]:
    """The largest batch up to which a GPU of the draft's own gives the most per GPU; 0 for none."""
    rates, found = found_rates(), {}
    for precision in PRECISIONS:
        shared, own = (
            [rates.get((precision, mode, batch), 0.0) for batch in BATCH_SIZES]
            for mode in ("colocated", "auto")
        )
        num_better = next((place for place, rate in enumerate(shared) if rate >= own[place]), len(shared))
        found[precision] = BATCH_SIZES[num_better - 1] if num_better else 0
    return found


def markdown() -> str:
    """Of drafts also what they are times the target alone."""
    rates = found_rates()

    def cell(precision: str, mode: str, batch: int) -> str | None:
        rate, plain = rates.get((precision, mode, batch)), rates.get((precision, "target_only", batch))
        if rate is None:
            return None
        return f"{rate:,.0f}" if mode == "target_only" or not plain else f"{rate:,.0f} ({rate / plain:.2f})"

    rows = [
        {
            "sequences": str(batch),
            **{
                f"{precision}, {place}": cell(precision, mode, batch)
                for precision in PRECISIONS
                for mode, place in PLACES.items()
            },
        }
        for batch in BATCH_SIZES
        if any(size == batch for _, _, size in rates)
    ]
    return Table.of(rows).markdown()


def main() -> None:
    command = "python -m tests.lab.emulation.placements"
    write_json(RESULTS, {"command": command, "date": now_utc(), "given": GIVEN, "found": measure()})


if __name__ == "__main__":
    main()
