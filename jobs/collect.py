"""Collect training examples for a head on the draft.

    accelerate launch jobs/collect.py --kind acceptance --config FILE --prompts PROMPTS --output FOLDER

Launched like jobs/generate.py, and resumed like it; jobs/train_head.py trains on what it leaves.
"""

import _package  # noqa: F401

from specdist.cli import collect

if __name__ == "__main__":
    collect.end()
