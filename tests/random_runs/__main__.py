"""Random runs of the engine, each compared with the target alone.

    python -m tests.random_runs --seed N --minutes M [--cases N] [--here]
    python -m tests.random_runs --only CASE-SEED        a case of its own seed, as a failure names it
    python -m tests.random_runs --case JSON             a case in full
    python -m tests.random_runs --faults [NAME ...]     plant faults: after how many cases is each found?

A failure is made smaller and printed as the line that repeats it. The exit code is 0, or 1 after a failure.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence

from tests.random_runs.campaign import Campaign, case_of, seed_of
from tests.random_runs.case import Case, from_line
from tests.random_runs.faults import show_faults
from tests.random_runs.jobs import JobCase, job_from_line
from tests.random_runs.shrinking import shrunk
from tests.random_runs.world import Worlds

SHRINKING_S = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.random_runs", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seed", type=int, default=0, help="of the cases' seeds")
    parser.add_argument("--minutes", type=float, default=1.0, help="for so long")
    parser.add_argument("--cases", type=int, default=None, help="at most so many cases")
    parser.add_argument("--only", metavar="CASE-SEED", help="this case alone, such as 3:17 or 3:17:ranks")
    parser.add_argument("--case", metavar="JSON", help="this case alone, as a failure prints it")
    parser.add_argument("--first", action="store_true", help="end at the first failure, without shrinking it")
    parser.add_argument("--here", action="store_true", help="no case on ranks of its own")
    parser.add_argument("--faults", nargs="*", metavar="NAME", help="plant these, or all")
    options = parser.parse_args(arguments)
    if options.faults is not None:
        return show_faults(options.faults)
    with Worlds() as worlds:
        if options.only is not None or options.case is not None:
            case = case_of(options.only) if options.case is None else _from_line(options.case)
            return _single(case, worlds, shrinks=not options.first)
        campaign = Campaign(worlds)
        begun, number = time.monotonic(), 0
        while time.monotonic() - begun < 60 * options.minutes and number != options.cases:
            seed = seed_of(options.seed, number, may_be_ranks=not options.here)
            number += 1
            wrong = campaign.add(seed)
            if wrong:
                print(f"case {seed} ({number} cases): {wrong[0]}", flush=True)
                if options.first:
                    return 1
                _show_smallest(case_of(seed), worlds)
        print(campaign.summary(time.monotonic() - begun), flush=True)
        biased = campaign.biased()
        for words in biased:
            print(words)
        return 1 if campaign.num_failures or biased else 0


def _from_line(line: str) -> Case | JobCase:
    return job_from_line(line) if line.startswith('{"job"') else from_line(line)


def _single(case: Case | JobCase, worlds: Worlds, *, shrinks: bool) -> int:
    print(case.line())
    found = worlds.attempt(case)
    for words in found.wrong:
        print(words)
    if found.wrong and shrinks:
        _show_smallest(case, worlds)
    print("wrong" if found.wrong else f"as the target alone; {found.num_preemptions} preemptions")
    return 1 if found.wrong else 0


def _show_smallest(case: Case | JobCase, worlds: Worlds) -> None:
    smallest = shrunk(case, lambda each: bool(worlds.attempt(each).wrong), limit_s=SHRINKING_S)
    for words in worlds.attempt(smallest).wrong[:3]:
        print(f"    {words}")
    print(f"    python -m tests.random_runs --case {shlex.quote(smallest.line())}", flush=True)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Libraries' threads may abort in the interpreter's teardown.
    os._exit(code)
