"""Collect training examples for a head on the draft.

    accelerate launch jobs/collect.py --kind acceptance --config FILE --prompts PROMPTS --output FOLDER

Launched like jobs/generate.py, and resumed like it; jobs/train_head.py trains on what it leaves.
"""

import os
import sys

from specdist.collecting.run import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # As in jobs/generate.py: all is written, and libraries' threads may abort while the interpreter ends.
    os._exit(code)
