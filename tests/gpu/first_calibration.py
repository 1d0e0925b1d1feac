"""What the day has measured, as ``calibration.json`` for the planner: see
specdist/lab/plan/calibration.py.

    python -m tests.gpu.first_calibration FOLDER

The folder is the day's. Times of a fake device are not written.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specdist.lab.plan.calibration import FORMAT, Calibration, MeasuredSampling, MeasuredSum
from specdist.utils.errors import UserError

FILE_NAME = "calibration.json"
# Steps whose folders are read, and the files there; those after the first are left out if they are missing.
COSTS, GRAPHS, SUMS = ("costs", "costs.json"), ("graphs", "graphs.json"), ("all-reduce", "sums.json")


def main() -> int:
    """Returns the exit code."""
    return calibrate(Path(sys.argv[1]))


def calibrate(day: Path) -> int:
    found = {step: json.loads((day / step / name).read_text()) for step, name in (COSTS, GRAPHS, SUMS)
             if (day / step / name).is_file()}  # fmt: skip
    fake = [step for step, content in found.items() if content["is_fake"]]
    if fake:
        say(f"no {FILE_NAME} is written: the device of {', '.join(fake)} was fake")
        return 0
    calibration_of(found).write(day / FILE_NAME)
    try:
        Calibration.read(day / FILE_NAME)
    except UserError as error:
        (day / FILE_NAME).unlink()
        say(f"no {FILE_NAME} is kept: {error}")
        return 1
    say((day / FILE_NAME).read_text())
    for step, _ in (GRAPHS, SUMS):
        if step not in found:
            say(f"without what the step {step} measures, which has not passed here")
    return 0


def calibration_of(found: dict[str, Any]) -> Calibration:
    """From what the steps wrote."""
    costs = found[COSTS[0]]
    # A time of zero or less was not measured.
    node_bytes = found.get(GRAPHS[0], {}).get("graph_node_bytes") or 0.0
    sums = found.get(SUMS[0], {}).get("sums", [])
    return Calibration(
        **costs["device"],
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        is_fake=False,
        format=FORMAT,
        graph_node_bytes=node_bytes if node_bytes > 0 else None,
        all_reduce=tuple(
            MeasuredSum(**{name: one[name] for name in ("num_ranks", "num_bytes", "seconds")}) for one in sums
        ),
        **costs["costs"] | {"sampling": tuple(MeasuredSampling(**one) for one in costs["costs"]["sampling"])},
    )


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
