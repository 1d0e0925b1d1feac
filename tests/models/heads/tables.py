"""Heads on the small pair, as tables: what ``jobs/benchmarks/heads-*.json`` and ``sprinter-*.json`` hold."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

from specdist.utils.table import Table, decimals
from tests.ranks import REPOSITORY

RESULTS = REPOSITORY / "jobs/benchmarks"
PUBLISHED = "published D3-w3"
RATIOS = ("λ 1", "λ 1.2", "λ 1.5")


def markdown() -> dict[str, str]:
    sprinter = _read("sprinter-small-pair-cpu")
    return {
        "heads-small-pair": acceptance_heads(),
        "sprinter-runs": sprinter_runs(sprinter["runs"]),
        "sprinter-verifiers": verifiers(sprinter),
    }


def acceptance_heads() -> str:
    """Waste over that of fixed lengths at the same verification rate; AUC of accepted against rejected."""
    rows = []
    for one in _read("heads-small-pair-cpu")["sets"]:
        waste, auc, best = one["waste_relative_to_fixed"], one["auc"], one["best_head"]
        heads = [name for name in auc if name.startswith("D")]
        first = max(heads, key=lambda name: auc[name])
        feature = max(auc[name] for name in ("entropy", "top_probability", "probability"))
        rows.append(
            {
                "prompts": Path(one["prompts"]).stem,
                "temperature": f"{one['temperature']:g}",
                **{name: decimals(waste[name]) for name in ("svip", "confidence", "gammatune_plus")},
                "published": decimals(waste[PUBLISHED]),
                "specdecpp (best head)": f"{waste[best]:.2f} ({best})",
                "AUC, best feature": decimals(feature, 3),
                "AUC, published": decimals(auc[PUBLISHED], 3),
                "AUC, best head": f"{auc[first]:.3f} ({first})",
            }
        )
    return Table.of(rows, num_names=2).markdown()


def sprinter_runs(runs: list[dict[str, Any]]) -> str:
    rows = [
        {
            "run": one["run"],
            "tokens/s": f"{mean(one['tokens_per_s_without_prompts']):.0f}",
            "target forwards per token": decimals(one["target_calls_per_token"], 3),
            "ROUGE-1": decimals(one["rouge"]["rouge1"][0], 3),
            "ROUGE-L": decimals(one["rouge"]["rougeL"][0], 3),
            "log-likelihood per token": decimals(one["log_likelihood_per_token"][0]),
        }
        for one in runs
    ]
    return Table.of(rows).markdown()


def verifiers(result: dict[str, Any]) -> str:
    """AUC on held-out rows by the greatest ratio that a verifier was trained with."""
    own, drawing = result["verifiers"], result["drawing_state"]["verifiers"]
    baseline = drawing["drawing state"]["baseline_auc"]
    trained = {
        "the state that drew the token, as in the paper": drawing["drawing state"],
        "that state and the features": drawing["drawing state with features"],
        "the token's own state": own["published"],
        "its own state and the features": own["with features"],
    }
    rows: list[dict[str, str | int | None]] = [
        {
            "the verifier reads": name,
            **{ratio: decimals(one["auc_per_max_ratio"][ratio], 3) for ratio in RATIOS},
        }
        for name, one in trained.items()
    ]
    rows += [
        {
            "the verifier reads": f"no verifier: {name}",
            **dict.fromkeys(RATIOS),
            "λ 1.2": decimals(baseline[key], 3),
        }
        for name, key in (
            ("the drawn token's probability", "probability"),
            ("the draft's entropy", "entropy"),
        )
    ]
    return Table.of(rows).markdown()


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
