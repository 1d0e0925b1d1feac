"""Faults in the papers' tables, as repeated."""

from tests.mutants.mutant import Mutant

PAPERS = ("tests/papers/test_papers.py",)

PAPERS_FAULTS = (
    Mutant(
        name="truncated-completion-is-drafted-past-its-end",
        file="papers/counts.py",
        old='np.minimum(cut["num_drafted_N"], most_N)',
        new='cut["num_drafted_N"]',
        tests=PAPERS,
    ),
    Mutant(
        name="gain-over-any-fixed-length",
        file="papers/specdecpp.py",
        old="max(self.fixed, key=",
        new="min(self.fixed, key=",
        tests=PAPERS,
    ),
    Mutant(
        name="acceptance-of-target-by-itself",
        file="papers/leviathan.py",
        old="minimum((target / t).softmax(1), (draft / t).softmax(1))",
        new="minimum((target / t).softmax(1), (target / t).softmax(1))",
        tests=PAPERS,
    ),
    Mutant(
        name="spread-over-first-lengths-of-one-policy",
        file="papers/gammatune.py",
        old='relative["SpecDecode"][pair].std() for pair',
        new="relative[label][pair].std() for pair",
        tests=PAPERS,
    ),
)
