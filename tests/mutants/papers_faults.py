"""Faults in the papers' tables, as repeated."""

from tests.mutants.mutant import Mutant

PAPERS = ("tests/lab/papers/test_papers.py",)

PAPERS_FAULTS = (
    Mutant("truncated-completion-is-drafted-past-its-end", "_truncated",
        'np.minimum(cut["num_drafted_N"], most_N)',
        'cut["num_drafted_N"]',
        PAPERS),
    Mutant("gain-over-any-fixed-length", "Found.best_fixed",
        "max(self.fixed, key=",
        "min(self.fixed, key=",
        PAPERS),
    Mutant("acceptance-of-target-by-itself", "acceptance_rates",
        "minimum((target / t).softmax(1), (draft / t).softmax(1))",
        "minimum((target / t).softmax(1), (target / t).softmax(1))",
        PAPERS),
    Mutant("spread-over-first-lengths-of-one-policy", "tables",
        'relative["SpecDecode"][pair].std() for pair',
        "relative[label][pair].std() for pair",
        PAPERS),
)
