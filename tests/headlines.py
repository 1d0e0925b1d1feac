"""The three tables in front of the measurements, and the results of ``jobs/benchmark.py``."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import groupby
from statistics import median

from specdist.utils.table import Table
from tests.lab.benchmark.results import ComparedMethod, ComparisonResult
from tests.lab.benchmark.tables import markdown_report
from tests.lab.emulation import drafter_rates
from tests.lab.emulation.policies import best_other, per_gpu
from tests.lab.emulation.results import Outcome
from tests.ranks import REPOSITORY

RESULTS = REPOSITORY / "jobs/benchmarks"
BESIDE_VLLM = ("vllm-20m-cpu", "vllm-20m-bfloat16-amx-cpu", "vllm-350m-bfloat16-cpu")
# The blocks that show results of jobs/benchmark.py whole.
REPORTS = {
    "beside-transformers": ("synthetic-350m-cpu", "small-pair-cpu"),
    "beside-vllm": (*BESIDE_VLLM, "vllm-20m-bfloat16-cpu", "vllm-350m-two-processes-cpu"),
    "overlap": ("overlap-350m-0.8-cpu", "overlap-350m-0.9-cpu"),
    "policies-small-pair": ("policies-small-pair-cpu", "policies-groups-small-pair-cpu"),
}


def headlines() -> dict[str, str]:
    return {
        "headline-drafters": drafter_rates.markdown(),
        "headline-vllm": beside_vllm(),
        "headline-policies": goodput_beside_others(),
        # In the page about policies.
        "benchmark": markdown_report(read("policies-small-pair-cpu"), is_brief=True),
        **{
            block: "\n\n".join(markdown_report(read(name)) for name in names)
            for block, names in REPORTS.items()
        },
    }


def read(name: str) -> ComparisonResult:
    return ComparisonResult.read(RESULTS / f"{name}.json")


def beside_vllm() -> str:
    """Of both engines the fastest way; the ratio is that of the defaults."""
    rows = []
    for result in map(read, BESIDE_VLLM):
        by_batch = groupby(sorted(result.methods, key=lambda one: one.batch_size), lambda one: one.batch_size)
        for batch, group in by_batch:
            methods = list(group)
            theirs = _fastest(methods, lambda name: name.startswith("vLLM"))
            default = _fastest(methods, lambda name: name == "specdist, goodput")
            ours = _fastest(methods, lambda name: name.startswith("specdist"))
            rows.append(
                {
                    "pair": f"{result.synthetic.shape if result.synthetic else '-'}, {result.models.dtype}",
                    "sequences": str(batch),
                    "vLLM, tokens/s": f"{theirs.tokens_per_s:,.0f}",
                    "specdist, fastest": f"{ours.tokens_per_s:,.0f}",
                    "specdist, default": f"{default.tokens_per_s:,.0f}",
                    "default over vLLM": f"{default.tokens_per_s / theirs.tokens_per_s:.2f}",
                }
            )
    return Table.of(rows, num_names=1).markdown()


def _per_gpu(outcome: Outcome) -> float:
    return outcome.tokens_per_s / outcome.num_gpus


def _fastest(methods: list[ComparedMethod], is_meant: Callable[[str], bool]) -> ComparedMethod:
    return max((one for one in methods if is_meant(one.name)), key=lambda one: one.tokens_per_s)


def goodput_beside_others() -> str:
    """Goodput over the best of all other policies, chosen afterwards for each setting, by mode."""
    settings = json.loads((RESULTS / "policies-emulated.json").read_text(encoding="utf-8"))["settings"]
    by_mode: dict[str, list[tuple[float, float]]] = {}
    for one in settings:
        rate, alone = one["tokens_per_s"]["goodput"], one["tokens_per_s"]["target only"]
        best = best_other(one, settings)[2]
        by_mode.setdefault(one["mode"], []).append((rate / best, per_gpu(rate / alone, one["mode"])))
    rows = [
        {
            "mode": mode.replace("_", " "),
            "settings": str(len(pairs)),
            "lowest": f"{min(ratio for ratio, _ in pairs):.3f}",
            "median": f"{median(ratio for ratio, _ in pairs):.3f}",
            "highest": f"{max(ratio for ratio, _ in pairs):.3f}",
            "x target only per GPU": f"{min(gain for _, gain in pairs):.2f} to "
            f"{max(gain for _, gain in pairs):.2f}",
        }
        for mode, pairs in by_mode.items()
    ]
    return Table.of(rows).markdown()
