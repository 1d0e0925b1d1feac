"""``specdist merge`` as a script: ``python jobs/merge.py --help``."""

import sys

from specdist.cli.merge import main

if __name__ == "__main__":
    sys.exit(main())
