"""Print what a run's finished shards hold: totals, theory beside practice, and some completions.

python jobs/show.py runs/demo/output --rows 2
python jobs/show.py --schema        what every column and every statistic means
"""

import sys

from specdist.cli.show import main

if __name__ == "__main__":
    sys.exit(main())
