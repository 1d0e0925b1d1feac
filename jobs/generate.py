"""Generate completions for a dataset of prompts: ``accelerate launch jobs/generate.py --config FILE``."""

import _package  # noqa: F401

from specdist.cli import generate

if __name__ == "__main__":
    generate.end()
