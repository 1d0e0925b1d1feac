"""Train a draft on what the target says: on finished rows of a run, or on rows that are generated first.

    python jobs/distill.py runs/mine --new_draft runs/draft
    accelerate launch jobs/distill.py --config RUN.yaml --first 0.05 --new_draft runs/draft --go_on

With --first or --go_on it is launched like jobs/generate.py, else with any number of ranks, which share the
training. The last line on stdout is a JSON document.
"""

import _package  # noqa: F401

from specdist.cli import distill

if __name__ == "__main__":
    distill.end()
