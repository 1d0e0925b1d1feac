"""Case after case, and what they say together."""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from tests.random_runs.case import Case
from tests.random_runs.checking import Found
from tests.random_runs.drawing import case_of
from tests.random_runs.trial import attempt
from tests.ranks import run_ranks
from tests.statistics import chi_square_p_value

NUM_RANKS = 3
NUM_BINS = 20
# Fewer say nothing.
LEAST_PLACES = 10 * NUM_BINS
# Of a sound engine, one campaign in a million is called biased.
ALARM = 1e-6


def found_of(names: Sequence[str]) -> Iterator[Found]:
    """Run the cases of these names: one after the other in this process, or all of them on real ranks. Raises
    AssertionError if a run on ranks has no end."""
    if not names[0].endswith(":ranks"):
        yield from (attempt(case_of(name)) for name in names)
        return
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "found.json")
        run_ranks("tests.random_runs.ranks", NUM_RANKS, str(output), *names)
        yield from (Found(**found) for found in json.loads(output.read_text(encoding="utf-8")))


class Campaign:
    """Keeps count of cases."""

    def __init__(self) -> None:
        self._places: defaultdict[str, list[float]] = defaultdict(list)
        self.num_failures = 0
        self.counts: Counter[str] = Counter()

    def add(self, name: str, found: Found) -> None:
        case = case_of(name)
        self.num_failures += bool(found.wrong)
        self.counts["preempted"] += found.num_preemptions > 0
        self._places[overlap_of(case)] += found.places
        kind = "rejection" if case.is_rejection else "greedy" if not case.temperature else "gumbel"
        self.counts.update(["cases", kind, case.placement, overlap_of(case)])

    def biased(self) -> list[str]:
        """Ways of drafting under which the tokens drawn under ``rejection`` do not follow their distribution,
        by a chi-square over twenty bins of all places."""
        groups = {**self._places, "all": [place for places in self._places.values() for place in places]}
        found = []
        for name, places in groups.items():
            if len(places) < LEAST_PLACES:
                continue
            counts = torch.from_numpy(np.histogram(places, NUM_BINS, (0, 1))[0])
            p_value = chi_square_p_value(counts, torch.full((NUM_BINS,), 1 / NUM_BINS))
            if p_value < ALARM / len(groups):
                found.append(f"{name}: {len(places)} tokens do not follow the target, p = {p_value:.1e}")
        return found

    def summary(self, duration_s: float) -> str:
        num_places = sum(map(len, self._places.values()))
        parts = [f"{count} {name}" for name, count in self.counts.most_common() if name != "cases"]
        return (
            f"{self.counts['cases']} cases in {duration_s:.0f} s, {self.num_failures} wrong: "
            f"{', '.join(parts)}; {num_places} tokens under rejection"
        )


def overlap_of(case: Case) -> str:
    if case.draft in ("none", "ngram"):
        return "ngram" if case.draft == "ngram" else "alone"
    if case.shapes or case.has_chooser:
        return "auto"
    return "asynchronous" if case.num_ahead_tokens else "synchronous"
