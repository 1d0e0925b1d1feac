"""The two tables in front of the measurements."""

from __future__ import annotations

import json
from statistics import median

from specdist.utils.table import Table
from tests.lab.emulation import drafter_rates
from tests.lab.emulation.policies import best_other, per_gpu
from tests.ranks import REPOSITORY

RESULTS = REPOSITORY / "jobs/benchmarks"


def headlines() -> dict[str, str]:
    return {
        "headline-drafters": drafter_rates.markdown(),
        "headline-policies": goodput_beside_others(),
    }


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
