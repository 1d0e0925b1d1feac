"""SpecDec++ (Huang, Guo, Wang 2024): Tables 1 and 3 and Figure 3, with heads of the published recipe.

Heads lie in the work folder as ``heads/D<depth>-w<weight>``, trained with token mixing r = 0.15.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specdist.models.heads.info import INFO_NAME, HeadInfo, read_head_info
from specdist.results.fronts import relative_waste
from specdist.utils.errors import UserError
from tests.lab.papers.counts import LLAMA_2, Counts, best, of_policy
from tests.lab.papers.tables import Claim, PaperTable
from tests.lab.papers.traces import Traces

SETS = ("alpaca_test", "humaneval", "gsm8k_test")
DEPTHS, WEIGHTS = range(5), (1, 3, 6, 12)
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
FIXED_LENGTHS = range(2, 15, 2)
PUBLISHED, PUBLISHED_THRESHOLD = "D3-w6", 0.7
TEMPERATURE, TOP_K = 1.0, 50
# Table 1: gain over the best fixed length. Table 3: train/KL, eval/KL by weight and depth.
PAPER_GAINS = {"alpaca_test": "+7.2%", "humaneval": "+11.1%", "gsm8k_test": "+9.4%"}
PAPER_KL = {
    (1, 0): "0.422, 0.412", (1, 1): "0.409, 0.390", (1, 2): "0.391, 0.387", (1, 3): "0.387, 0.384",
    (1, 4): "0.384, 0.383", (3, 0): "0.515, 0.491", (3, 1): "0.479, 0.461", (3, 2): "0.475, 0.458",
    (3, 3): "0.462, 0.454", (3, 4): "0.465, 0.451", (6, 0): "0.657, 0.637", (6, 1): "0.620, 0.596",
    (6, 2): "0.607, 0.589", (6, 3): "0.617, 0.582", (6, 4): "0.603, 0.575", (12, 0): "0.922, 0.871",
    (12, 1): "0.830, 0.805", (12, 2): "0.834, 0.794", (12, 3): "0.801, 0.781", (12, 4): "0.799, 0.773",
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """On one set of prompts: of every head by threshold, and of fixed lengths."""

    heads: dict[str, dict[float, Counts]]
    fixed: dict[int, Counts]

    @property
    def best_fixed(self) -> int:
        return max(self.fixed, key=lambda length: self.fixed[length].speedup(LLAMA_2))

    @property
    def best(self) -> Counts:
        every = [each for of_head in self.heads.values() for each in of_head.values()]
        return max(every, key=lambda each: each.speedup(LLAMA_2))

    @property
    def published(self) -> Counts:
        return self.heads[PUBLISHED][PUBLISHED_THRESHOLD]

    def gain(self, counts: Counts) -> float:
        """Over the best fixed length."""
        return counts.speedup(LLAMA_2) / self.fixed[self.best_fixed].speedup(LLAMA_2) - 1

    @property
    def waste(self) -> float | None:
        every = [each.rates for of_head in self.heads.values() for each in of_head.values()]
        return relative_waste(every, [each.rates for each in self.fixed.values()])


def head_paths(work: Path) -> dict[str, str]:
    """By name, those that were trained. Raises :class:`UserError` without the published one."""
    names = [f"D{depth}-w{weight}" for weight in WEIGHTS for depth in DEPTHS]
    paths = {name: work / "heads" / name for name in names}
    found = {name: str(path) for name, path in paths.items() if (path / INFO_NAME).exists()}
    if PUBLISHED not in found:
        raise UserError(f"--work {work} has no head heads/{PUBLISHED}: run jobs/benchmarks/papers.sh")
    return found


def tables(traces: Traces) -> tuple[list[PaperTable], list[Claim]]:
    """Table 1 with Figure 3, and Table 3."""
    paths = head_paths(traces.work)
    found = {}
    for name in SETS:
        trace = [traces.trace(name, TEMPERATURE, heads=list(paths.values()), top_k=TOP_K)]
        found[name] = Found(
            {
                head: {h: of_policy("specdecpp", trace, index, stop_threshold=h) for h in THRESHOLDS}
                for index, head in enumerate(paths)
            },
            {length: of_policy("fixed", trace, num_draft_tokens=length) for length in FIXED_LENGTHS},
        )
    infos = {head: read_head_info(path) for head, path in paths.items()}
    return [gains(found), ablation(found, infos)], claims(found)


def gains(found: dict[str, Found]) -> PaperTable:
    rows = []
    for name, each in found.items():
        fixed = each.fixed[each.best_fixed]
        rows.append(
            [
                name,
                f"{fixed.speedup(LLAMA_2):.3f} (K = {each.best_fixed})",
                f"{each.published.speedup(LLAMA_2):.3f} ({each.gain(each.published):+.1%})",
                f"{each.best.speedup(LLAMA_2):.3f} ({each.gain(each.best):+.1%})",
                PAPER_GAINS[name],
                "-" if each.waste is None else f"{each.waste:.2f}",
                *(f"{rate:.3f}" for rate in (*each.published.rates, *fixed.rates)),
            ]
        )
    return PaperTable(
        "SpecDec++, Table 1 and Figure 3",
        [
            *(
                "prompts",
                "best fixed length",
                "published setting",
                "best head and h",
                "paper: best over fixed",
            ),
            "front's waste over that of fixed lengths",
            *("published: N_target/N", "N_discarded/N", "fixed: N_target/N", "N_discarded/N"),
        ],
        rows,
        f"Speed-ups over the target alone at the paper's c = {LLAMA_2:.3f}, T = 1, top-k 50, cap 20. "
        "Published setting: r = 0.15, w_rej 6, D 3, h 0.7, the hidden state alone. Waste: discarded tokens "
        "of SpecDec++'s Pareto front over those of the fixed lengths at equal verification rates; below 1 it "
        "is the better front, as in the paper's Figure 3.",
    )


def ablation(found: dict[str, Found], infos: dict[str, HeadInfo]) -> PaperTable:
    rows = []
    for head, info in infos.items():
        weight = int(head.partition("-w")[2])
        cells = [str(weight), str(info.depth)]
        cells += [f"{info.metrics[name]:.3f}" for name in ("training_kl", "kl", "auc")]
        for each in found.values():
            h = best(each.heads[head])
            cells.append(f"{each.heads[head][h].speedup(LLAMA_2):.3f} (h = {h:g})")
        rows.append([*cells, PAPER_KL[weight, info.depth]])
    baseline = infos[PUBLISHED].metrics["baseline_auc"]
    return PaperTable(
        "SpecDec++, Table 3: loss weights and depths of the head",
        [
            *("w_rej", "D", "train/KL", "eval/KL", "AUC"),
            *(f"{name}: best" for name in found),
            "paper: train/KL, eval/KL",
        ],
        rows,
        "KL of the predictions from min(1, P/Q), in nats, on training and on held-out rows. The drawn "
        f"token's own probability has an AUC of {baseline['probability']:.3f} on the same tokens, the "
        f"draft's entropy {baseline['entropy']:.3f}.",
    )


def claims(found: dict[str, Found]) -> list[Claim]:
    best_gains = [each.gain(each.best) for each in found.values()]
    published = [each.gain(each.published) for each in found.values()]
    wastes = [each.waste for each in found.values()]
    return [
        Claim(
            "SpecDec++",
            "faster than the best fixed length on Alpaca, HumanEval and GSM8K (paper: 7.2, 11.1, 9.4%)",
            ", ".join(f"{gain:+.1%}" for gain in best_gains)
            + " with the best head and h; "
            + ", ".join(f"{gain:+.1%}" for gain in published)
            + " with the published setting",
            min(best_gains) > 0,
        ),
        Claim(
            "SpecDec++",
            "a strictly better Pareto front of verification and discard rates (Figure 3)",
            "waste at equal verification "
            + ", ".join("-" if waste is None else f"{waste:.2f}" for waste in wastes)
            + " of that of fixed lengths",
            all(waste is not None and waste < 1 for waste in wastes),
        ),
    ]
