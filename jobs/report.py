"""``specdist report`` as a script: ``python jobs/report.py --help``."""

import _package  # noqa: F401

from specdist.cli import report

if __name__ == "__main__":
    report.end()
