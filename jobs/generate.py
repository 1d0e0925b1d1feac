"""Generate completions for a dataset of prompts: ``accelerate launch jobs/generate.py --config FILE``."""

import sys

from specdist.job.generate import main

if __name__ == "__main__":
    sys.exit(main())
