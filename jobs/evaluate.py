"""Score what a run has generated, and compare it with another run.

    python jobs/evaluate.py runs/mine --task gsm8k
    python jobs/evaluate.py runs/mine --task humaneval --allow_code_execution
    python jobs/evaluate.py runs/mine --against runs/target-only

The last line on stdout is a JSON document.
"""

import _package  # noqa: F401

from specdist.cli import evaluate

if __name__ == "__main__":
    evaluate.end()
