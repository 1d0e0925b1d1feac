"""The main job with its steps counted by phase; called in the ranks' processes."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from specdist.cli import generate
from specdist.job.ranks.activity import Activity


def main(arguments: Sequence[str]) -> int:
    """Writes the counts beside the run's folder when the rank is about to leave."""
    output = Path(arguments[arguments.index("--output") + 1])
    counts: Counter[str] = Counter()
    step = Activity.step

    def counted(activity: Activity) -> None:
        counts[activity.phase] += 1
        if activity.phase == "leaving":
            _path(output, int(os.environ["RANK"])).write_text(json.dumps(counts))
        step(activity)

    Activity.step = counted  # type: ignore[method-assign]
    return generate(arguments)


def steps_of(output: Path, rank: int) -> dict[str, int]:
    """By phase."""
    counts: dict[str, int] = json.loads(_path(output, rank).read_text())
    return counts


def _path(output: Path, rank: int) -> Path:
    return output.with_name(f"steps-{rank}.json")
