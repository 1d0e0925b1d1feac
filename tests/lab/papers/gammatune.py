"""GammaTune (Gautam, Shrestha, Reddy 2025): mean speed-ups and their spread over first lengths (Table 2)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.lab.papers.counts import Counts, of_policy
from tests.lab.papers.tables import Claim, PaperTable
from tests.lab.papers.traces import LONG_CAP, Traces

FIRST_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24)
SHOWN_LENGTHS = (4, 6, 7, 20)
# t_draft / t_target by pair: Table 1.
PAIRS = {"Vicuna 13B": 5.61 / 20.15, "Vicuna 7B": 1.76 / 14.29, "Llama 8B": 8.87 / 16.65}
PAPER = {
    "SpecDecode": "1.00 ± 0.28, 1.00 ± 0.20, 1.00 ± 0.19",
    "HFHeuristic": "1.14 ± 0.14, 1.04 ± 0.05, 1.12 ± 0.09",
    "AssistantThreshold": "1.24 ± 0.03, 1.05 ± 0.04, 1.17 ± 0.11",
    "GammaTune": "1.23 ± 0.04, 1.13 ± 0.03, 1.12 ± 0.06",
    "GammaTune+": "1.28 ± 0.02, 1.13 ± 0.02, 1.18 ± 0.05",
}


def tables(traces: Traces) -> tuple[list[PaperTable], list[Claim]]:
    """Table 2."""
    rounds = list(traces.spec_bench(0.0).values())
    methods: dict[str, Callable[[int], Counts]] = {
        "SpecDecode": lambda first: of_policy("fixed", rounds, num_draft_tokens=first),
        "HFHeuristic": lambda first: of_policy("hf_heuristic", rounds, num_draft_tokens=first),
        "AssistantThreshold": lambda first: of_policy("confidence", rounds, max_draft_tokens=first),
        "GammaTune": lambda first: of_policy("gammatune", rounds, num_draft_tokens=first),
        "GammaTune, Algorithm 1 as printed": lambda first: of_policy(
            "gammatune", rounds, num_draft_tokens=first, length_bonus=0
        ),
        "GammaTune+": lambda first: of_policy("gammatune_plus", rounds, num_draft_tokens=first),
    }
    found = {label: [method(first) for first in FIRST_LENGTHS] for label, method in methods.items()}
    relative = {
        label: {
            pair: np.array([each.speedup(ratio) for each in counts])
            / np.mean([each.speedup(ratio) for each in found["SpecDecode"]])
            for pair, ratio in PAIRS.items()
        }
        for label, counts in found.items()
    }
    shown_cost = PAIRS["Vicuna 7B"]
    rows = []
    for label, counts in found.items():
        by_first = dict(zip(FIRST_LENGTHS, counts, strict=True))
        rows.append(
            [
                label,
                *(f"{speeds.mean():.2f} ± {speeds.std():.2f}" for speeds in relative[label].values()),
                *(f"{by_first[first].speedup(shown_cost):.2f}" for first in SHOWN_LENGTHS),
                PAPER.get(label, ""),
            ]
        )
    table = PaperTable(
        "GammaTune, Table 2",
        [
            "method",
            *(f"at {pair}'s c = {ratio:.2f}" for pair, ratio in PAIRS.items()),
            *(f"first length {first}" for first in SHOWN_LENGTHS),
            "paper (the same three pairs)",
        ],
        rows,
        f"Spec-Bench, T = 0; means and standard deviations over the first lengths {FIRST_LENGTHS}, relative "
        f"to SpecDecode's mean. First lengths: speed-ups over the target alone at c = {shown_cost:.2f}. "
        "AssistantThreshold stops below 0.4, with the first length as its cap; the cap of the others is "
        f"{LONG_CAP}. The paper's models are other ones, measured on a GPU.",
    )
    claims = []
    for label, paper in (("GammaTune", "15%, ± 5%"), ("GammaTune+", "16%, ± 3%")):
        speeds = [relative[label][pair] for pair in PAIRS]
        spread = [relative["SpecDecode"][pair].std() for pair in PAIRS]
        gain = float(np.mean([each.mean() for each in speeds])) - 1
        narrower = [float(each.std() / wide) for each, wide in zip(speeds, spread, strict=True)]
        claims.append(
            Claim(
                label,
                f"faster than fixed lengths on average, with less spread over the first length ({paper})",
                f"{gain:+.1%}; spread {min(narrower):.2f} to {max(narrower):.2f} of that of fixed lengths",
                gain > 0 and max(narrower) < 1,
            )
        )
    return [table], claims
