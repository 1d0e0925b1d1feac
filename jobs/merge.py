"""One Arrow or Parquet file of a complete run, in input order, with every shard verified.

python jobs/merge.py runs/mine --output mine.parquet
"""

import argparse
import sys

from specdist.config.arguments import local_path
from specdist.data import RunFolder
from specdist.data.merging import merge_run
from specdist.utils.errors import UserError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=local_path, help="folder of the run")
    parser.add_argument("--output", type=local_path, required=True, help="file to write: .arrow or .parquet")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    arguments = parser.parse_args()
    try:
        num_rows = merge_run(RunFolder(arguments.run), arguments.output, overwrite=arguments.overwrite)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{num_rows:,} rows in {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
