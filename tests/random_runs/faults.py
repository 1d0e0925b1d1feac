"""Plants a fault in a copy of the repository, and counts the cases until a random run finds it."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.interplay_faults import INTERPLAY_FAULTS
from tests.mutants.mutant import Mutant
from tests.mutants.planting import copy_repository, import_from

SEEDS, MOST_CASES, LIMIT_S = (1, 2, 3), 300, 400
WORDS = "words.txt"
FIRST_FAILURE = re.compile(r"\((\d+) cases\): (.*)")


def show_faults(names: Sequence[str]) -> int:
    """Prints a line per fault: cases needed with each seed, and what was seen. 1 if one was not found."""
    faults = [fault for fault in INTERPLAY_FAULTS if not names or fault.name in names]
    missed = 0
    for fault in faults:
        begun = time.monotonic()
        counts, words = zip(*(_cases_until_found(fault, seed) for seed in SEEDS), strict=True)
        middle = statistics.median(MOST_CASES + 1 if count is None else count for count in counts)
        missed += middle > MOST_CASES
        print(
            f"{fault.name}: {middle} cases ({', '.join(str(count or f'>{MOST_CASES}') for count in counts)}; "
            f"{time.monotonic() - begun:.0f} s); {next(filter(None, words), '')[:100]}",
            flush=True,
        )
    return 1 if missed else 0


def _cases_until_found(fault: Mutant, seed: int) -> tuple[int | None, str]:
    """None: not found. With what was seen."""
    with tempfile.TemporaryDirectory(prefix="specdist-fault-") as name:
        root = Path(name)
        copy_repository(root, fault)
        process = multiprocessing.get_context("fork").Process(target=_run, args=(root, seed))
        process.start()
        process.join()
        said = (root / WORDS).read_text()
    found = FIRST_FAILURE.search(said)
    if found is None:
        return (MOST_CASES, "the chi-square of all cases") if process.exitcode else (None, "")
    return int(found[1]), found[2]


def _run(root: Path, seed: int) -> None:
    """In the forked process."""
    with (root / WORDS).open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    import_from(root)
    command = importlib.import_module("tests.random_runs.__main__")
    limits = ["--cases", str(MOST_CASES), "--minutes", str(LIMIT_S / 60)]
    code = command.main(["--seed", str(seed), *limits, "--first", "--here"])
    sys.stdout.flush()
    os._exit(code)
