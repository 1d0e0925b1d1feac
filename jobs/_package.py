"""The scripts here find the package beside this folder, unless one is installed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
