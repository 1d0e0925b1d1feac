"""Python imports this at its start where this folder is in PYTHONPATH: see tests/job/gate.py."""

import os
from pathlib import Path

from tests.job.gate import FOLDER, install

install(Path(os.environ[FOLDER]))
