"""The scripts here find the package beside this folder, unless one is installed, and need a Python that it
supports."""

import sys
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036
    found = ".".join(map(str, sys.version_info[:2]))
    sys.exit(f"error: specdist needs Python 3.10 or newer, and this is {found}: start a newer one")

sys.path.append(str(Path(__file__).resolve().parents[1]))
