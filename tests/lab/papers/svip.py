"""SVIP (Zhang et al. 2024): speed-ups on Spec-Bench and over the generated length, and H_qp / H_q."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from specdist.lab.replay import ExhaustiveTrace
from tests.lab.papers.counts import LLAMA_2, TENTH, Counts, best, of_policy, truncated
from tests.lab.papers.tables import Claim, PaperTable
from tests.lab.papers.traces import LONG_CAP, TASKS, Traces

PAPER = "SVIP"
THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.3, 1.6, 2.0, 2.5)
LENGTHS = (128, 256, 512, 1024)
# Average speed-ups of Pythia, Qwen2.5 and LLaMA-3: Tables 1 and 5.
AVERAGES = {
    0.0: {"constant": "1.42, 1.07, 2.34", "heuristic": "1.53, 1.07, 2.76", "SVIP": "1.63, 1.29, 2.83"},
    1.0: {"constant": "0.65, 0.96, 1.60", "heuristic": "0.83, 0.99, 1.58", "SVIP": "1.02, 1.20, 1.58"},
}
MIN_COMPLETIONS = 5
MIN_ENTROPY = 0.01  # in nats; the ratio of Figure 3 means nothing below

Method = Callable[[Sequence[ExhaustiveTrace]], Counts]


def methods() -> dict[str, Method]:
    """The paper's three, SVIP with each threshold."""
    found: dict[str, Method] = {
        "constant 5": lambda traces: of_policy("fixed", traces, num_draft_tokens=5),
        "heuristic from 5": lambda traces: of_policy("hf_heuristic", traces, num_draft_tokens=5),
    }
    for h in THRESHOLDS:
        found[f"SVIP h = {h:g}"] = partial(of_policy, "svip", stop_root_entropy=h)
    return found


def tables(traces: Traces) -> tuple[list[PaperTable], list[Claim]]:
    """Tables 1, 2, 5 and 6, Figures 3 and 5."""
    found, claims = [], []
    for temperature in AVERAGES:
        long = traces.trace("mt_bench", temperature, cap=LONG_CAP, max_new_tokens=LENGTHS[-1])
        for table, claim in (
            by_task(traces.spec_bench(temperature), temperature),
            by_length(long, temperature),
        ):
            found.append(table)
            claims.append(claim)
    return [*found, ratio_of_entropies(traces.logits(1.0))], claims


def by_task(traces: dict[str, ExhaustiveTrace], temperature: float) -> tuple[PaperTable, Claim]:
    totals: dict[str, Counts] = {}
    rows = []
    for label, method in methods().items():
        of_task = {task: method([trace]) for task, trace in traces.items()}
        total = totals[label] = method(list(traces.values()))
        rows.append(
            [
                label,
                *(f"{each.speedup(TENTH):.2f}" for each in of_task.values()),
                f"{total.speedup(TENTH):.2f}",
                f"{total.speedup(LLAMA_2):.2f}",
                f"{total.num_drafted / total.num_target:.2f}",
                f"{total.num_accepted / total.num_target:.2f}",
                f"{total.num_accepted / total.num_drafted:.2f}",
                AVERAGES[temperature][label.split()[0]],
            ]
        )
    number = 1 if temperature == 0 else 5
    table = PaperTable(
        f"SVIP, Table {number} (T = {temperature:g}) and Figure 5",
        [
            *("method", *TASKS, "all", f"all, c = {LLAMA_2:.2f}", "draft length", "accepted", "acceptance"),
            "paper: average (Pythia, Qwen2.5, LLaMA-3)",
        ],
        rows,
        f"Spec-Bench; speed-ups over the target alone at c = {TENTH:g}, cap {LONG_CAP}. The paper chooses h "
        "from 0.2 to 0.5; this pair's entropies are higher, so that larger ones are shown, too.",
    )
    thresholds = [label for label in totals if label.startswith("SVIP")]
    top = max(thresholds, key=lambda label: totals[label].speedup(TENTH))
    gain = totals[top].speedup(TENTH) / totals["constant 5"].speedup(TENTH) - 1
    paper = "15 to 21%" if temperature == 0 else "57%, 25%, -1%"
    claim = Claim(
        PAPER,
        f"faster than a constant length of 5 at T = {temperature:g} (paper: {paper})",
        f"{gain:+.1%} with the best threshold ({top}), of all thresholds "
        f"{sum(totals[each].speedup(TENTH) > totals['constant 5'].speedup(TENTH) for each in thresholds)} "
        f"of {len(thresholds)} are faster",
        gain > 0,
    )
    return table, claim


def by_length(trace: ExhaustiveTrace, temperature: float) -> tuple[PaperTable, Claim]:
    """Tables 2 and 6, of the completions that are as long."""
    rows, gains = [], []
    for length in LENGTHS:
        whole = [each for each in trace.prompts if each.num_tokens >= length]
        if len(whole) < MIN_COMPLETIONS:
            break
        cut = [truncated(ExhaustiveTrace(whole, trace.origin), length)]
        found = {label: method(cut) for label, method in methods().items()}
        h = best({h: found[f"SVIP h = {h:g}"] for h in THRESHOLDS}, TENTH)
        speeds = [
            found[label].speedup(TENTH) for label in ("constant 5", "heuristic from 5", f"SVIP h = {h:g}")
        ]
        gains.append(speeds[2] / speeds[0] - 1)
        rows.append([str(length), str(len(whole)), *(f"{speed:.2f}" for speed in speeds), f"{h:g}"])
    table = PaperTable(
        f"SVIP, Table {6 if temperature == 0 else 2}: speed-ups over the generated length (MT-Bench, "
        f"T = {temperature:g})",
        ["tokens", "completions", "constant 5", "heuristic from 5", "SVIP, best h", "h"],
        rows,
        f"Over the target alone at c = {TENTH:g}, of completions that have at least so many tokens, "
        f"where there are {MIN_COMPLETIONS} or more. The "
        "paper goes on to 8,000 tokens; this pair's context ends at 2,048.",
    )
    claim = Claim(
        PAPER,
        f"the gain over a constant length lasts for long generations (T = {temperature:g})",
        f"{gains[0]:+.1%} at {rows[0][0]} tokens, {gains[-1]:+.1%} at {rows[-1][0]}",
        min(gains) > 0,
    )
    return table, claim


def ratio_of_entropies(logits: list[tuple[torch.Tensor, torch.Tensor]]) -> PaperTable:
    """Figure 3, and how well the entropy says the acceptance."""
    ratios, entropies, overlaps = [], [], []
    for target_TV, draft_TV in logits:
        q_TV = draft_TV.softmax(1)
        entropy_T = torch.special.entr(q_TV).sum(1)
        cross_T = -(q_TV * target_TV.log_softmax(1)).sum(1)
        known_T = entropy_T > MIN_ENTROPY
        ratios.append((cross_T / entropy_T)[known_T].numpy())
        entropies.append(entropy_T.numpy())
        overlaps.append(torch.minimum(target_TV.softmax(1), q_TV).sum(1).numpy())
    ratio_T, entropy_T, overlap_T = (np.concatenate(each) for each in (ratios, entropies, overlaps))
    marks = np.quantile(ratio_T, [0.05, 0.25, 0.5, 0.75, 0.95])
    row = [
        *(f"{mark:.2f}" for mark in marks),
        f"{np.mean((ratio_T >= 1) & (ratio_T <= 1.3)):.0%}",
        f"{np.corrcoef(entropy_T, overlap_T)[0, 1]:.2f}",
        f"{np.corrcoef(np.sqrt(entropy_T), overlap_T)[0, 1]:.2f}",
    ]
    return PaperTable(
        "SVIP, Figure 3: H_qp / H_q",
        [
            *("5%", "25%", "median", "75%", "95%", "in 1 to 1.3"),
            *("correlation of H_q and β", "of sqrt(H_q) and β"),
        ],
        [row],
        f"After the prefixes of Leviathan's Table 3 with H_q above {MIN_ENTROPY:g} nats; β = Σ min(P, Q). "
        "The paper: most tokens in a narrow range, about 1.0 to 1.3.",
    )
