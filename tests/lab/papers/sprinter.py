"""SPRINTER (Zhong et al. 2025): its verifiers, the tokens kept per target pass, and what the loss costs.

The work folder has verifiers as ``heads/verifier-<state>-<features>``, lossy runs of them and an exact run as
``runs/sprinter-<state>-<features>`` and ``runs/exact``, and the evaluations of both as ``runs/<name>/rouge``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.ipc

from specdist.data.run.run_folder import RunFolder
from specdist.job.totals.report import total_stats
from specdist.models.heads.info import read_head_info
from specdist.results.evaluate.results import ROWS_FILE
from tests.lab.papers.counts import LLAMA_2, TENTH, Counts, of_policy
from tests.lab.papers.specdecpp import PUBLISHED, PUBLISHED_THRESHOLD, head_paths
from tests.lab.papers.tables import Claim, PaperTable
from tests.lab.papers.traces import Traces

PAPER = "SPRINTER"
STATES = {"drawing": "N + 1", "own": "N + 2"}  # draft passes of a block of N passed tokens and a doubted one
FEATURES = ("none", "draft")
KINDS = ("original", "draft", "target", "mixed")
LOSSY_TOKENS = 64  # of the runs, as papers.sh makes them
ROUGE = ("rouge1", "rouge2", "rougeL")
# Table 2, WiKi-Summary: average tokens, and speed-up over speculative decoding.
PAPER_SPEEDS = {
    "SD, γ = 5": "2.17, 1x",
    "SpecDec++": "1.16, 1.23x",
    "AdaEDL": "0.82, 1.31x",
    "SPRINTER, drawing state": "11.10, 1.64x",
}


def label(state: str, features: str) -> str:
    return f"SPRINTER, {state} state" + ", features" * (features == "draft")


def tables(traces: Traces) -> tuple[list[PaperTable], list[Claim]]:
    """Figures 3, 9 and 14; Tables 2 and 3; Table 1 and Figure 8."""
    found, verifier_claim = verifiers(traces.work)
    speed, speed_claim = speeds(traces)
    loss, loss_claim = quality(traces.work)
    return [found, speed, loss], [verifier_claim, speed_claim, loss_claim]


def verifiers(work: Path) -> tuple[PaperTable, Claim]:
    rows: list[list[str]] = []
    areas: dict[str, float] = {}
    metrics: dict[str, Any] = {}
    for state, num_passes in STATES.items():
        for features in FEATURES:
            metrics = read_head_info(work / "heads" / f"verifier-{state}-{features}").metrics
            kinds = metrics["auc_per_prefix_kind"]
            rates = metrics["true_positive_rate"], metrics["false_positive_rate"]
            values = [*metrics["auc_per_max_ratio"].values(), *(kinds[kind] for kind in KINDS), *rates]
            rows.append([state, features, *(f"{each:.3f}" for each in values), num_passes])
            areas[label(state, features)] = metrics["auc"]
    for name, each in metrics["baseline_auc"].items():
        rows.append([f"{name}, no verifier", "", "", f"{each:.3f}", *[""] * 7, "N + 1"])
    baseline = metrics["baseline_auc"]["probability"]
    published = areas[label("drawing", "none")]
    table = PaperTable(
        "SPRINTER, Figures 3, 9 and 14: AUC of the verifiers",
        ["hidden state", "features", "λ = 1", "1.2", "1.5", *KINDS, "t", "f", "draft passes"],
        rows,
        "On held-out rows; of single kinds of prefixes, and true (t) and false (f) positive rates at τ = "
        "0.5, for λ = 1.2. Draft passes: of a block of N passed tokens and a doubted one. The paper's "
        "verifiers read the state that drew the token: 0.8 on LM1B and 0.9 on Wiki-summary, with GPT-Neo.",
    )
    claim = Claim(
        PAPER,
        "a linear verifier of the draft's last hidden state has an AUC of 0.8 to 0.9",
        f"{published:.3f} with the state that drew the token, {max(areas.values()):.3f} the best verifier; "
        f"the drawn token's own probability {baseline:.3f}",
        published >= 0.8,
    )
    return table, claim


def speeds(traces: Traces) -> tuple[PaperTable, Claim]:
    """Exact policies from a trace; the lossy ones from runs, since their prefixes are their own."""
    paths = head_paths(traces.work)
    trace = [traces.trace("dolly_passage", 1, heads=[paths[PUBLISHED]], max_new_tokens=LOSSY_TOKENS)]
    found = {
        "SD, γ = 5": of_policy("fixed", trace, num_draft_tokens=5),
        "SpecDec++": of_policy("specdecpp", trace, stop_threshold=PUBLISHED_THRESHOLD),
        "AdaEDL": of_policy("adaedl", trace),
    }
    for state in STATES:
        for features in FEATURES:
            run = RunFolder(traces.work / "runs" / f"sprinter-{state}-{features}")
            found[label(state, features)] = Counts.of(total_stats(run))
    base = found["SD, γ = 5"]
    rows = [
        [
            name,
            f"{each.num_accepted / each.num_target:.2f}",
            f"{each.num_target / each.num_tokens:.3f}",
            f"{each.num_draft / each.num_tokens:.3f}",
            *(f"{each.speedup(c) / base.speedup(c):.2f}" for c in (TENTH, LLAMA_2)),
            PAPER_SPEEDS.get(name, ""),
        ]
        for name, each in found.items()
    ]
    table = PaperTable(
        "SPRINTER, Tables 2 and 3",
        [
            *("method", "average tokens", "N_target/N", "N_draft/N"),
            *(f"over SD, c = {TENTH:g}", f"over SD, c = {LLAMA_2:.2f}"),
            "paper: average tokens, over SD",
        ],
        rows,
        f"{len(trace[0].prompts)} prompts of dolly_passage at T = 1. Average tokens: of the draft, kept per "
        "target pass. Only SPRINTER is lossy. The paper's: GPT-Neo, Wiki-summary, 20 tokens.",
    )
    gain = found[label("drawing", "none")].speedup(TENTH) / base.speedup(TENTH)
    claim = Claim(
        PAPER,
        "1.64 and 1.83 times as fast as speculative decoding",
        f"{gain:.2f} at c = {TENTH:g}",
        gain >= 1.6,
    )
    return table, claim


def quality(work: Path) -> tuple[PaperTable, Claim]:
    """ROUGE against the references, and who wins prompt by prompt."""
    exact = scores(work / "runs" / "exact")
    rows = [["SD (exact)", *(f"{np.mean(exact[name]):.4f}" for name in ROUGE), ""]]
    relative, errors = {}, {}
    for state in STATES:
        for features in FEATURES:
            lossy = scores(work / "runs" / f"sprinter-{state}-{features}")
            wins = float(np.mean(lossy["rougeL"] >= exact["rougeL"]))
            mean = np.mean(exact["rougeL"])
            difference_N = (lossy["rougeL"] - exact["rougeL"]) / mean
            relative[label(state, features)] = float(difference_N.mean())
            errors[label(state, features)] = float(difference_N.std() / np.sqrt(len(difference_N)))
            cells = [f"{np.mean(lossy[name]):.4f}" for name in ROUGE]
            rows.append([label(state, features), *cells, f"{wins:.1%}"])
    table = PaperTable(
        "SPRINTER, Table 1 and Figure 8: quality",
        ["method", "ROUGE-1", "ROUGE-2", "ROUGE-L", "wins or ties against SD"],
        rows,
        "Against the references of dolly_passage. Wins and ties by ROUGE-L, prompt by prompt: the paper "
        "asked GPT-4 (45.2% on Wiki-summary, 39.6% on LM1B).",
    )
    published = label("drawing", "none")
    off, error = relative[published], 2 * errors[published]
    claim = Claim(
        PAPER,
        "ROUGE within about 2% of that of speculative decoding",
        f"ROUGE-L {off:+.1%} ± {error:.1%} (two standard errors) with the published verifier, "
        f"{min(relative.values()):+.1%} to {max(relative.values()):+.1%} over all",
        abs(off) <= 0.02 and error <= 0.02,
    )
    return table, claim


def scores(run: Path) -> dict[str, np.ndarray]:
    """By ROUGE's name, those of every row, in the rows' order."""
    rows = pyarrow.ipc.open_file(run / "rouge" / ROWS_FILE).read_all().sort_by("row_id")
    return {name: rows[name].to_numpy() for name in ROUGE}
