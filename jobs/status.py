"""``specdist status`` as a script: ``python jobs/status.py --help``."""

import sys

import _package  # noqa: F401

from specdist.cli.status import main

if __name__ == "__main__":
    sys.exit(main())
