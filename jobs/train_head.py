"""Train a head on the draft from what jobs/collect.py has left.

    python jobs/train_head.py --kind acceptance --data runs/examples --output runs/head

The last line on stdout is a JSON document.
"""

import _package  # noqa: F401

from specdist.cli import train_head

if __name__ == "__main__":
    train_head.end()
