"""``specdist merge`` as a script: ``python jobs/merge.py --help``."""

import sys

import _package  # noqa: F401

from specdist.cli.merge import main

if __name__ == "__main__":
    sys.exit(main())
