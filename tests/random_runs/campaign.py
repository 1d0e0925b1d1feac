"""Case after case of one seed, and what they say together."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import torch

from tests.random_runs.case import Case
from tests.random_runs.drawing import draw
from tests.random_runs.jobs import JobCase, draw_job
from tests.random_runs.world import Worlds
from tests.statistics import chi_square_p_value

NUM_BINS = 20
# Fewer say nothing.
LEAST_PLACES = 10 * NUM_BINS
# Of a sound engine, one campaign in a million is called biased.
ALARM = 1e-6
# Every so many cases, one runs on real ranks.
RANKS_EVERY = 5
# And so many, the job itself is run and killed.
JOB_EVERY = 40


def seed_of(seed: int, number: int, *, may_be_ranks: bool = True) -> str:
    """The name of a case: from it alone it can be drawn again."""
    if may_be_ranks and number % JOB_EVERY == JOB_EVERY - 1:
        return f"{seed}:{number}:job"
    is_of_ranks = may_be_ranks and number % RANKS_EVERY == RANKS_EVERY - 1
    return f"{seed}:{number}:ranks" if is_of_ranks else f"{seed}:{number}"


def case_of(name: str) -> Case | JobCase:
    seed, number, *placement = name.split(":")
    if placement == ["job"]:
        return draw_job(f"{seed}:{number}")
    return draw(f"{seed}:{number}", placement=placement[0] if placement else None)


class Campaign:
    """Runs cases and keeps count."""

    def __init__(self, worlds: Worlds) -> None:
        self._worlds = worlds
        self._places: defaultdict[str, list[float]] = defaultdict(list)
        self.num_failures = 0
        self.counts: Counter[str] = Counter()

    def add(self, name: str) -> list[str]:
        """Run the case of this name. Returns what is wrong with it."""
        case = case_of(name)
        found = self._worlds.attempt(case)
        self.num_failures += bool(found.wrong)
        self.counts["preempted"] += found.num_preemptions > 0
        if isinstance(case, JobCase):
            self.counts.update(["cases", "jobs"])
            return found.wrong
        self._places[overlap_of(case)] += found.places
        kind = "rejection" if case.is_rejection else "greedy" if not case.temperature else "gumbel"
        self.counts.update(["cases", kind, case.placement, overlap_of(case)])
        return found.wrong

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
