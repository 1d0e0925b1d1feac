"""Write a random target and draft that agree as often as wanted, in sizes from 5M to 70B parameters.

    python jobs/make_synthetic.py --shape 350m --acceptance 0.8 --output runs/synthetic/350m
    python jobs/make_synthetic.py --shape 70b --epsilon 0.05 --dtype bfloat16 --output runs/synthetic/70b

The last line on stdout is a JSON document.
"""

import _package  # noqa: F401

from specdist.cli import make_synthetic

if __name__ == "__main__":
    make_synthetic.end()
