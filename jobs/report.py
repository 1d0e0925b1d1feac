"""Write a run's report: a page that opens in any browser, from disk, and its pictures as PNG files.

    python jobs/report.py runs/mine
    python jobs/report.py runs/mine --tune runs/tune            with what jobs/tune.py has replayed
    python jobs/report.py runs/one runs/two --folder runs/both  several runs side by side

The last line on stdout is a JSON document.
"""

import sys

from specdist.cli.report import main

if __name__ == "__main__":
    sys.exit(main())
