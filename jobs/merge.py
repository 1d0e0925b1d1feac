"""``specdist merge`` as a script: ``python jobs/merge.py --help``."""

import _package  # noqa: F401

from specdist.cli import merge

if __name__ == "__main__":
    merge.end()
