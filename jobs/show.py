"""``specdist show`` as a script: ``python jobs/show.py --help``."""

import _package  # noqa: F401

from specdist.cli import show

if __name__ == "__main__":
    show.end()
