"""``specdist report`` as a script: ``python jobs/report.py --help``."""

import sys

import _package  # noqa: F401

from specdist.cli.report import main

if __name__ == "__main__":
    sys.exit(main())
