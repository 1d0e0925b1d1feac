"""Train the demo pair, a small target and a smaller draft, on the standard library's documentation.

    python jobs/train_demo.py --output runs/demo

A complete pair is found again and left as it is; an interrupted one is built again.
"""

import _package  # noqa: F401

from specdist.cli import train_demo

if __name__ == "__main__":
    train_demo.end()
