"""``specdist status`` as a script: ``python jobs/status.py --help``."""

import sys

from specdist.cli.status import main

if __name__ == "__main__":
    sys.exit(main())
