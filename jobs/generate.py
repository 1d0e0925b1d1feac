"""Generate completions for a dataset of prompts: ``accelerate launch jobs/generate.py --config FILE``."""

import _package  # noqa: F401

from specdist.cli.ending import end_at_once
from specdist.cli.generate import main

if __name__ == "__main__":
    end_at_once(main())
