"""The papers' own tables, repeated on another pair: papers.sh runs all of it, and this makes the tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from papers_replays import (
    ALPACA,
    DEPTHS,
    FIRST_LENGTHS,
    GAMMATUNE_PAIRS,
    LLAMA_2,
    PAPER_GAMMATUNE,
    PAPER_KL,
    SVIP_AVERAGES,
    TASKS,
    THRESHOLDS,
    WEIGHTS,
    Counts,
    Traces,
    best,
    of,
)

from specdist.data import RunFolder
from specdist.heads.info import INFO_NAME, read_head_info
from specdist.job.report import total_stats
from specdist.replay import ExhaustiveTrace
from specdist.replay.fronts import relative_waste
from specdist.theory.formulas import tokens_per_call
from specdist.utils.markdown import table

TABLES = ["leviathan", "svip", "gammatune", "specdecpp", "verifiers", "sprinter"]
KINDS = ("original", "draft", "target", "mixed")
PAPER_SPRINTER = {
    "SD, γ = 5": "2.17, 1x",
    "AdaEDL": "0.82, 1.31x",
    "SPRINTER, drawing state": "11.10, 1.64x",
}
BEGIN, END = "<!-- papers:begin -->", "<!-- papers:end -->"


class Papers:
    """The tables of a pair."""

    def __init__(self, traces: Traces, work: Path) -> None:
        self.traces, self._work = traces, work
        self.figures: dict[str, object] = {}
        self.sections: list[str] = []

    def add(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]], text: str) -> None:
        self.sections.append(f"## {title}\n\n{table(head, rows)}\n\n{text}\n")
        self.figures[title] = [dict(zip(head, row, strict=True)) for row in rows]

    # The tables.

    def specdecpp_heads(self) -> list[str]:
        """Those of all depths and weights that were trained, in this order."""
        names = [f"D{depth}-w{weight}" for weight in WEIGHTS for depth in DEPTHS]
        paths = [self._work / "heads" / name for name in names]
        return [str(path) for path in paths if (path / INFO_NAME).exists()]

    def specdecpp(self) -> None:
        paths = self.specdecpp_heads()
        infos = [read_head_info(path) for path in paths]
        traces = {name: [self.traces.trace(name, 1, heads=paths, top_k=50)] for name in ALPACA}
        every = {
            name: [
                {h: of("specdecpp", each, head, stop_threshold=h) for h in THRESHOLDS}
                for head in range(len(paths))
            ]
            for name, each in traces.items()
        }
        fixed = {
            name: {length: of("fixed", each, num_draft_tokens=length) for length in range(2, 15, 2)}
            for name, each in traces.items()
        }
        published = paths.index(str(self._work / "heads" / "D3-w6"))
        paper = {"alpaca_test": "+7.2%", "humaneval": "+11.1%", "gsm8k_test": "+9.4%"}
        rows = []
        for name in ALPACA:
            most = best(fixed[name])
            top = max(
                (each for one in every[name] for each in one.values()), key=lambda one: one.speedup(LLAMA_2)
            )
            recipe = every[name][published][0.7]
            waste = relative_waste(
                [each.rates for one in every[name] for each in one.values()],
                [each.rates for each in fixed[name].values()],
            )
            rows.append(
                [
                    name,
                    f"{fixed[name][most].speedup(LLAMA_2):.3f} (K = {most})",
                    f"{recipe.speedup(LLAMA_2):.3f}",
                    f"{top.speedup(LLAMA_2):.3f}",
                    f"{recipe.speedup(LLAMA_2) / fixed[name][most].speedup(LLAMA_2) - 1:+.1%}",
                    f"{top.speedup(LLAMA_2) / fixed[name][most].speedup(LLAMA_2) - 1:+.1%}",
                    paper[name],
                    "-" if waste is None else f"{waste:.2f}",
                    *(f"{rate:.3f}" for rate in recipe.rates),
                    *(f"{rate:.3f}" for rate in fixed[name][most].rates),
                ]
            )
        self.add(
            "SpecDec++, Table 1 and Figure 3",
            [
                "prompts",
                "best fixed length",
                "published setting",
                "best head and h",
                "published / fixed",
                "best / fixed",
                "paper: best / fixed",
                "front's waste over that of fixed lengths",
                "published: N_target/N",
                "N_discarded/N",
                "fixed: N_target/N",
                "N_discarded/N",
            ],
            rows,
            f"Speed-ups over the target alone at the paper's t_draft / t_target = {LLAMA_2:.3f}, T = 1, "
            "top-k 50, cap 20. Published setting: r = 0.15, w_rej 6, D 3, h 0.7, the hidden state alone. "
            "Waste: discarded tokens of SpecDec++'s Pareto front over those of the fixed lengths at equal "
            "verification rates; below 1 it is the better front, as it is in the paper's Figure 3.",
        )
        rows = []
        for index, (path, info) in enumerate(zip(paths, infos, strict=True)):
            weight = int(Path(path).name.partition("-w")[2])
            cells = [str(weight), str(info.depth)]
            cells += [f"{info.metrics[name]:.3f}" for name in ("training_kl", "kl", "auc")]
            for name in ALPACA:
                h = best(every[name][index])
                cells.append(f"{every[name][index][h].speedup(LLAMA_2):.3f} (h = {h:g})")
            rows.append([*cells, PAPER_KL[weight, info.depth]])
        baseline = infos[published].metrics["baseline_auc"]
        self.add(
            "SpecDec++, Table 3",
            [
                "w_rej",
                "D",
                "train/KL",
                "eval/KL",
                "AUC",
                *(f"{name}: best" for name in ALPACA),
                "paper: train/KL, eval/KL",
            ],
            rows,
            "KL of the predictions from min(1, P/Q), unweighted, in nats. The drawn token's own "
            f"probability has an AUC of {baseline['probability']:.3f} on the same tokens, the draft's "
            f"entropy {baseline['entropy']:.3f}.",
        )

    def svip(self) -> None:
        for temperature, paper in SVIP_AVERAGES.items():
            traces = dict(zip(TASKS, self.traces.spec_bench(temperature), strict=True))
            methods: dict[str, Callable[[Sequence[ExhaustiveTrace]], Counts]] = {
                "constant 5": lambda each: of("fixed", each, num_draft_tokens=5),
                "heuristic from 5": lambda each: of("hf_heuristic", each, num_draft_tokens=5),
            }
            for h in (0.3, 0.4, 0.5, 0.7, 1.0, 1.3):
                methods[f"SVIP h = {h:g}"] = lambda each, h=h: of("svip", each, stop_root_entropy=h)
            rows = []
            for label, method in methods.items():
                found = {task: method([trace]) for task, trace in traces.items()}
                total = method(list(traces.values()))
                rows.append(
                    [
                        label,
                        *(f"{each.speedup(0.1):.2f}" for each in found.values()),
                        f"{total.speedup(0.1):.2f}",
                        f"{total.speedup(LLAMA_2):.2f}",
                        f"{total.num_drafted / total.num_target:.2f}",
                        f"{total.num_accepted / total.num_target:.2f}",
                        f"{total.num_accepted / total.num_drafted:.2f}",
                        paper[label.split()[0]],
                    ]
                )
            self.add(
                f"SVIP, Table {'1' if temperature == 0 else '5'} (T = {temperature:g}) and Figure 5",
                [
                    "method",
                    *TASKS,
                    "all",
                    f"all, c = {LLAMA_2:.2f}",
                    "draft length",
                    "accepted",
                    "acceptance",
                    "paper: average (Pythia, Qwen2.5, LLaMA-3)",
                ],
                rows,
                "Spec-Bench; speed-ups over the target alone at t_draft / t_target = 0.1, cap 40. The "
                "paper chooses h from 0.2 to 0.5; this pair's entropies are higher, so larger ones are "
                "shown, too.",
            )

    def gammatune(self) -> None:
        traces = self.traces.spec_bench(0.0)
        methods: dict[str, Callable[[int], Counts]] = {
            "SpecDecode": lambda first: of("fixed", traces, num_draft_tokens=first),
            "HFHeuristic": lambda first: of("hf_heuristic", traces, num_draft_tokens=first),
            "AssistantThreshold": lambda first: of("confidence", traces, max_draft_tokens=first),
            "GammaTune": lambda first: of("gammatune", traces, num_draft_tokens=first),
            "GammaTune, Algorithm 1 as printed": lambda first: of(
                "gammatune", traces, num_draft_tokens=first, length_bonus=0
            ),
            "GammaTune+": lambda first: of("gammatune_plus", traces, num_draft_tokens=first),
        }
        found = {label: [method(first) for first in FIRST_LENGTHS] for label, method in methods.items()}
        rows = []
        for label, each in found.items():
            cells = [label]
            for ratio in GAMMATUNE_PAIRS.values():
                base = np.mean([one.speedup(ratio) for one in found["SpecDecode"]])
                speeds = np.array([one.speedup(ratio) for one in each]) / base
                cells.append(f"{speeds.mean():.2f} ± {speeds.std():.2f}")
            by_first = dict(zip(FIRST_LENGTHS, each, strict=True))
            cells += [f"{by_first[first].speedup(0.123):.2f}" for first in (4, 6, 7, 20)]
            rows.append([*cells, PAPER_GAMMATUNE.get(label, "")])
        self.add(
            "GammaTune, Table 2",
            [
                "method",
                *(f"at {name}'s c = {ratio:.2f}" for name, ratio in GAMMATUNE_PAIRS.items()),
                *(f"first length {first}" for first in (4, 6, 7, 20)),
                "paper (same three pairs)",
            ],
            rows,
            f"Spec-Bench, greedy; means and standard deviations over the first lengths {FIRST_LENGTHS}, "
            "over the mean of SpecDecode. First lengths: speed-ups over the target alone at c = 0.123. "
            "AssistantThreshold stops below 0.4, with the first length as its cap. Cap of the others: 40.",
        )

    def leviathan(self) -> None:
        spectra = self.traces.overlaps()
        rows = [[f"{t:g}", f"{alpha:.3f}"] for t, alpha in spectra["alpha"].items()]
        self.add(
            "Leviathan et al., α over temperature",
            ["T of both models", "α"],
            rows,
            "Mean of sum_x min(p(x), q(x)) after prefixes of the target's own completions at T = 1 "
            "(Spec-Bench). The paper's Table 3: smaller at T = 1 than at T = 0 for every pair of its "
            "(T5-small for T5-XXL, translation: 0.75 and 0.62).",
        )
        for temperature in (0.0, 1.0):
            traces = self.traces.spec_bench(temperature)
            first = np.concatenate([p.num_accepted_N[1:-1] > 0 for t in traces for p in t.prompts])
            alpha = float(first.mean())
            rows = []
            for length in (1, 2, 3, 4, 5, 6, 8, 10):
                measured = of("fixed", traces, num_draft_tokens=length)
                tokens = measured.num_tokens / measured.num_target
                predicted = tokens_per_call(alpha, length)
                rows.append(
                    [
                        str(length),
                        f"{predicted:.2f}",
                        f"{tokens:.2f}",
                        f"{tokens / predicted:.2f}",
                        f"{predicted / (1 + 0.1 * length):.2f}",
                        f"{measured.speedup(0.1):.2f}",
                    ]
                )
            self.add(
                f"Leviathan et al., gain over γ (T = {temperature:g}, α = {alpha:.3f})",
                [
                    "γ",
                    "tokens per target pass, predicted",
                    "measured",
                    "measured / predicted",
                    "speed-up at c = 0.1, predicted",
                    "measured",
                ],
                rows,
                "Predicted: Equation 1 and Theorem 3.8, for α of the first drafted tokens.",
            )
        ratio_T = spectra["ratio"]
        marks = np.quantile(ratio_T, [0.05, 0.25, 0.5, 0.75, 0.95])
        self.add(
            "SVIP, Figure 3: H_qp / H_q",
            [
                "5%",
                "25%",
                "median",
                "75%",
                "95%",
                "share in [1, 1.3]",
                "corr. of H_q and β",
                "corr. of sqrt(H_q) and β",
            ],
            [
                [
                    *(f"{mark:.2f}" for mark in marks),
                    f"{np.mean((ratio_T >= 1) & (ratio_T <= 1.3)):.2f}",
                    f"{spectra['corr']:.2f}",
                    f"{spectra['corr_root']:.2f}",
                ]
            ],
            "Of the same prefixes at T = 1, where H_q > 0.01; β = sum_x min(p, q). The paper: most tokens "
            "in a narrow range, about 1.0 to 1.3.",
        )

    def verifiers(self) -> None:
        rows: list[list[str]] = []
        metrics: dict[str, Any] = {}
        for state, num_passes in (("drawing", "N + 1"), ("own", "N + 2")):
            for features in ("none", "draft"):
                metrics = read_head_info(self._work / "heads" / f"verifier-{state}-{features}").metrics
                kinds = metrics["auc_per_prefix_kind"]
                rates = metrics["true_positive_rate"], metrics["false_positive_rate"]
                found = [*metrics["auc_per_max_ratio"].values(), *(kinds[kind] for kind in KINDS), *rates]
                rows.append([state, features, *(f"{each:.3f}" for each in found), num_passes])
        for name, each in metrics["baseline_auc"].items():
            rows.append([f"{name}, no verifier", "", "", f"{each:.3f}", *[""] * 7, "N + 1"])
        self.add(
            "SPRINTER, Figures 3, 9 and 14: AUC of the verifiers",
            ["hidden state", "features", "λ = 1", "1.2", "1.5", *KINDS, "t", "f", "draft passes"],
            rows,
            "On held-out rows; of single kinds of prefixes, and t and f at τ = 0.5, for λ = 1.2. Draft "
            "passes: of a block of N passed tokens and a doubted one. The paper's verifiers read the "
            "state that drew the token: 0.8 on LM1B and 0.9 on Wiki-summary, with GPT-Neo.",
        )

    def sprinter(self) -> None:
        """Exact policies from a trace; the lossy runs live, since their prefixes are their own."""
        traces = [self.traces.trace("dolly_passage", 1)]
        found = {"SD, γ = 5": of("fixed", traces, num_draft_tokens=5), "AdaEDL": of("adaedl", traces)}
        for state in ("drawing", "own"):
            for features in ("none", "draft"):
                run = RunFolder(self._work / "runs" / f"sprinter-{state}-{features}")
                label = f"SPRINTER, {state} state" + ", features" * (features == "draft")
                found[label] = Counts.of(total_stats(run))
        base = found["SD, γ = 5"]
        rows = [
            [
                label,
                f"{each.num_accepted / each.num_target:.2f}",
                f"{each.num_target / each.num_tokens:.3f}",
                f"{each.num_draft / each.num_tokens:.3f}",
                f"{each.num_draft / each.num_target:.2f}",
                *(f"{each.speedup(c) / base.speedup(c):.2f}" for c in (0.1, LLAMA_2)),
                PAPER_SPRINTER.get(label, ""),
            ]
            for label, each in found.items()
        ]
        self.add(
            "SPRINTER, Tables 2 and 3",
            [
                *("method", "average tokens", "N_target/N", "N_draft/N", "draft passes per round"),
                *("over SD, c = 0.1", f"over SD, c = {LLAMA_2:.2f}", "paper: average tokens, over SD"),
            ],
            rows,
            f"{len(traces[0].prompts)} prompts of dolly_passage at T = 1, at most 128 new tokens. Average "
            "tokens: of the draft, kept per target pass. Only SPRINTER is lossy. The paper's: GPT-Neo, "
            "Wiki-summary, 20 tokens.",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", type=Path, default=Path("runs/small-pair"))
    parser.add_argument("--prompts", type=Path, default=Path("runs/prompts"))
    parser.add_argument("--work", type=Path, default=Path("runs/papers"))
    parser.add_argument("--num_prompts", type=int, default=48)
    parser.add_argument("--tables", nargs="+", default=TABLES)
    parser.add_argument("--output", type=Path, default=Path("jobs/benchmarks"))
    options = parser.parse_args()
    traces = Traces(options.pair, options.prompts, options.work, options.num_prompts)
    papers = Papers(traces, options.work)
    for name in options.tables:
        getattr(papers, name)()
    (options.output / "papers.json").write_text(
        json.dumps(papers.figures, indent=1, ensure_ascii=False) + "\n"
    )
    page = options.output / "papers.md"
    before, found, rest = page.read_text().partition(BEGIN)
    assert found, f"{page} has no line {BEGIN}"
    page.write_text("\n".join([before + BEGIN + "\n", *papers.sections, END + rest.partition(END)[2]]))


if __name__ == "__main__":
    main()
