"""Show a run's progress: shards and their replicas, rows, tokens per second, expected end, errors by kind.

    specdist status runs/mine
    specdist status runs/mine --watch

Exit code 0: the run is complete; 1: it is not; 2: the folder has no run. The last line on stdout is a JSON
document.
"""

from __future__ import annotations

import json
import time
from argparse import RawTextHelpFormatter
from collections.abc import Sequence

from specdist.cli.ending import tells_mistakes
from specdist.config.arguments import CommandParser

INTERVAL_S = 5.0


@tells_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("output", help="folder of the run, or its URL")
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=INTERVAL_S,
        metavar="SECONDS",
        help=f"repeat every so many seconds until the run is complete (default: {INTERVAL_S:g})",
    )
    given = parser.values(arguments)

    from specdist.data.store.access import reading
    from specdist.job.totals.status import StatusReader

    with reading(given.output) as output:
        reader = StatusReader(output)
        status = reader.read()
    try:
        while given.watch is not None and not status.is_complete:
            print(*status.lines(), "", sep="\n", flush=True)
            time.sleep(given.watch)
            status = reader.read()
    except KeyboardInterrupt:
        pass
    print(*status.lines(), json.dumps(status.to_json()), sep="\n")
    return 0 if status.is_complete else 1
