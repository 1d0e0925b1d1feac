"""Find the draft-length policy for a pair of models on this hardware.

    python jobs/tune.py --target TARGET --draft DRAFT --prompts data/prompts.parquet --output runs/tune

The last line on stdout is a JSON document.
"""

import _package  # noqa: F401

from specdist.cli import tune

if __name__ == "__main__":
    tune.end()
