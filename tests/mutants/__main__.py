"""Plant the mutants of the list one at a time, and print which test killed each and after how long.

    python -m tests.mutants [--list] [--only NAME ...] [--dangerous] [--jobs N] [--skip_sound]

First the tests run on the sound code, where they must pass. A mutant whose tests twice do not end is killed
by "time-out"; if its tests cannot be imported, by "collection". The last line of stdout is JSON,
``{"planted": n, "killed": n, "survivors": [...]}``. The exit code is 0, 1 if a mutant survives, 2 if a test
fails on the sound code.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Sequence

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import Mutant, read_sources
from tests.mutants.planting import TIME_OUT, Run, import_libraries

SOUND_LIMIT_S = 3600
# A mutant's tests take at most as long as all tests took on the sound code, on this machine a moment ago;
# tests that take this much longer hang.
LEAST_LIMIT_S = 60
LIMIT_RATIO = 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the mutants and their tests, plant none")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="plant only these")
    parser.add_argument("--dangerous", action="store_true", help="plant only the most dangerous ones")
    parser.add_argument("--skip_sound", action="store_true", help="do not run the tests on the sound code")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    options = parser.parse_args(arguments)
    unknown = set(options.only or ()) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"--only: there is no mutant {', '.join(sorted(unknown))}: see --list")
    mutants = [
        mutant
        for mutant in MUTANTS
        if (not options.only or mutant.name in options.only)
        and (not options.dangerous or mutant.is_dangerous)
    ]
    if options.list:
        sources = read_sources()
        for mutant in mutants:
            print(
                f"{mutant.name}  ({mutant.find(sources).path}, {mutant.where})\n    {'  '.join(mutant.tests)}"
            )
        return 0
    import_libraries()
    sound_s = 0.0 if options.skip_sound else _time_of_sound_code(mutants)
    if sound_s is None:
        return 2
    survivors = _plant(mutants, options.jobs, limit_s=LEAST_LIMIT_S + LIMIT_RATIO * sound_s)
    result = {
        "planted": len(mutants), "killed": len(mutants) - len(survivors), "survivors": survivors
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    return 1 if survivors else 0


def _time_of_sound_code(mutants: list[Mutant]) -> float | None:
    """Seconds; None if a test fails."""
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    outcome = Run(tests, None, limit_s=SOUND_LIMIT_S).finish()
    if outcome.killer is not None:
        print(f"{outcome.output}\n{outcome.killer} fails on the sound code: fix it first", file=sys.stderr)
        return None
    print(f"{len(tests)} selections pass on the sound code in {outcome.duration_s:.0f} s", flush=True)
    return outcome.duration_s


def _plant(mutants: list[Mutant], num_jobs: int, *, limit_s: float) -> list[str]:
    """The names of the survivors."""
    survivors = []
    begun = time.monotonic()
    waiting, running, repeated = deque(mutants), dict[Mutant, Run](), set[Mutant]()
    while waiting or running:
        while waiting and len(running) < num_jobs:
            mutant = waiting.popleft()
            running[mutant] = Run(mutant.tests, mutant, limit_s=limit_s)
        time.sleep(0.05)
        for mutant in [mutant for mutant, run in running.items() if run.is_over]:
            outcome = running.pop(mutant).finish()
            if outcome.killer == TIME_OUT and mutant not in repeated:
                # A machine may stop once for that long; tests that hang do so again.
                repeated.add(mutant)
                waiting.append(mutant)
                continue
            if outcome.killer is None:
                survivors.append(mutant.name)
            fate = f"killed by {outcome.killer}" if outcome.killer else "SURVIVES"
            print(f"{outcome.duration_s:6.1f} s  {mutant.name}: {fate}", flush=True)
    print(f"{len(mutants)} mutants in {time.monotonic() - begun:.0f} s", flush=True)
    return survivors


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Libraries' threads may abort in the interpreter's teardown.
    os._exit(code)
