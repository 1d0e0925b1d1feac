"""``specdist show`` as a script: ``python jobs/show.py --help``."""

import sys

import _package  # noqa: F401

from specdist.cli.show import main

if __name__ == "__main__":
    sys.exit(main())
