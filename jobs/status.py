"""``specdist status`` as a script: ``python jobs/status.py --help``."""

import _package  # noqa: F401

from specdist.cli import status

if __name__ == "__main__":
    status.end()
