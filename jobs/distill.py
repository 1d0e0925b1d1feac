"""Train a draft on what the target says, from the finished rows of a run.

    python jobs/distill.py runs/mine --new_draft runs/draft

Under accelerate launch any number of ranks share the training. The same command goes on with one that was
killed. The last line on stdout is a JSON document.
"""

import _package  # noqa: F401

from specdist.cli import distill

if __name__ == "__main__":
    distill.end()
