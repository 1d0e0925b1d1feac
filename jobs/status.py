"""How far a run is: shards, who works on them, rows, tokens per second, the end, errors by kind.

    python jobs/status.py runs/mine
    python jobs/status.py runs/mine --watch

Exit code 0: the run is complete; 1: it is not; 2: there is no run. The last line on stdout is a JSON
document.
"""

import argparse
import json
import sys
import time

from specdist.config.arguments import local_path
from specdist.job.status import StatusReader
from specdist.utils.errors import UserError

INTERVAL_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("output", type=local_path, help="folder of the run")
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=INTERVAL_S,
        metavar="SECONDS",
        help=f"look again every so many seconds until the run is complete (default: {INTERVAL_S:g})",
    )
    arguments = parser.parse_args()
    reader = StatusReader(arguments.output)
    try:
        status = reader.read()
        while arguments.watch is not None and not status.is_complete:
            print(*status.lines(), "", sep="\n", flush=True)
            time.sleep(arguments.watch)
            status = reader.read()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    print(*status.lines(), json.dumps(status.to_json()), sep="\n")
    return 0 if status.is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
