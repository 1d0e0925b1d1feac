"""One Arrow or Parquet file of a complete run, in input order, with every shard verified.

python jobs/merge.py runs/mine --output mine.parquet
"""

import sys

from specdist.cli.merge import main

if __name__ == "__main__":
    sys.exit(main())
