"""Generate completions for a dataset of prompts: ``accelerate launch jobs/generate.py --config FILE``."""

import os
import sys

from specdist.job.generate import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written. Communication libraries' threads sometimes abort while the interpreter ends,
    # which the launcher would report as the failure of a run that has succeeded.
    os._exit(code)
