"""Repeat the papers' own tables on a pair of models; jobs/benchmarks/papers.sh runs all its steps.

python jobs/papers.py --target TARGET --draft DRAFT --prompts FOLDER --work FOLDER --output papers.json
"""

import sys

import _package  # noqa: F401

from specdist.cli.papers import main

if __name__ == "__main__":
    sys.exit(main())
