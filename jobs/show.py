"""``specdist show`` as a script: ``python jobs/show.py --help``."""

import sys

from specdist.cli.show import main

if __name__ == "__main__":
    sys.exit(main())
