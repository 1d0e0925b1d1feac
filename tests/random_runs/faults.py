"""Plants a fault in a copy of the repository, and counts the cases until a random run finds it."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.interplay_faults import INTERPLAY_FAULTS
from tests.mutants.mutant import Mutant
from tests.mutants.planting import copy_repository

SEEDS, MOST_CASES, LIMIT_S = (1, 2, 3), 400, 300
FIRST_FAILURE = re.compile(r"\((\d+) cases\): (.*)")


def show_faults(names: Sequence[str]) -> int:
    """Prints a line per fault: cases needed with each seed, and what was seen. 1 if one was not found."""
    faults = [fault for fault in INTERPLAY_FAULTS if not names or fault.name in names]
    missed = 0
    for fault in faults:
        begun = time.monotonic()
        counts, words = zip(*(_cases_until_found(fault, seed) for seed in SEEDS), strict=True)
        found = [count for count in counts if count is not None]
        missed += not found
        middle = f"{statistics.median(found):g}" if found else "not found"
        print(
            f"{fault.name}: {middle} cases ({', '.join(str(count or f'>{MOST_CASES}') for count in counts)}; "
            f"{time.monotonic() - begun:.0f} s); {next(filter(None, words), '')[:100]}",
            flush=True,
        )
    return 1 if missed else 0


def _cases_until_found(fault: Mutant, seed: int) -> tuple[int | None, str]:
    with tempfile.TemporaryDirectory(prefix="specdist-fault-") as folder:
        copy_repository(Path(folder), fault)
        command = [sys.executable, "-m", "tests.random_runs", "--seed", str(seed), "--cases", str(MOST_CASES),
                   "--minutes", str(LIMIT_S / 60), "--first", "--here"]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    found = FIRST_FAILURE.search(ended.stdout)
    if found is None:
        return (MOST_CASES, "the chi-square of all cases") if ended.returncode else (None, "")
    return int(found[1]), found[2]
