"""How far a run is: shards, who works on them, rows, tokens per second, the end, errors by kind.

    python jobs/status.py runs/mine
    python jobs/status.py runs/mine --watch

Exit code 0: the run is complete; 1: it is not; 2: there is no run. The last line on stdout is a JSON
document.
"""

import sys

from specdist.cli.status import main

if __name__ == "__main__":
    sys.exit(main())
