"""Random runs of the engine, each compared with the target alone.

    python -m tests.random_runs --seed N --minutes M [--ranks]
    python -m tests.random_runs --only NAME        the case that a failure names

The exit code is 0, or 1 after a failure.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from tests.random_runs.campaign import Campaign, found_of
from tests.random_runs.drawing import case_of

# Cases on ranks that share one start.
NUM_AT_ONCE = 20


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.random_runs", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seed", type=int, default=0, help="of the cases' seeds")
    parser.add_argument("--minutes", type=float, default=1.0, help="for so long")
    parser.add_argument("--ranks", action="store_true", help="on three real ranks")
    parser.add_argument("--only", metavar="NAME", help="this case alone, such as 3:17 or 3:17:ranks")
    options = parser.parse_args(arguments)
    campaign, begun, number = Campaign(), time.monotonic(), 0
    if options.only is not None:
        print(case_of(options.only))
    while time.monotonic() - begun < 60 * options.minutes:
        suffix, count = (":ranks", NUM_AT_ONCE) if options.ranks else ("", 1)
        names = [f"{options.seed}:{number + more}{suffix}" for more in range(count)]
        names = names if options.only is None else [options.only]
        number += count
        for name, found in zip(names, found_of(names), strict=True):
            campaign.add(name, found)
            for words in found.wrong:
                print(f"python -m tests.random_runs --only {name}: {words}", flush=True)
        if options.only is not None:
            break
    print(campaign.summary(time.monotonic() - begun), flush=True)
    biased = campaign.biased()
    for words in biased:
        print(words)
    return 1 if campaign.num_failures or biased else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Libraries' threads may abort in the interpreter's teardown.
    os._exit(code)
