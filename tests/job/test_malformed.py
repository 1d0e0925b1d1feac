"""A damaged file of every kind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.job.malformed import trials

# Of a seed with which both ends come about often; the inputs are the same every time.
SEED = 5


def test_a_damaged_file_is_refused_or_does_no_harm(tmp_path: Path) -> None:
    """No traceback, no hang, and the earlier run's shards are as they were."""
    found = list(trials(tmp_path, SEED))
    faults = [outcome for outcome in found if outcome[2].startswith("FAULT")]
    assert not faults, faults
    ends = Counter(outcome for _, _, outcome in found)
    assert min(ends["refused"], ends["ended well"]) > len(found) / 8
