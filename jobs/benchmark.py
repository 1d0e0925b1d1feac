"""Compare specdist with transformers on the same models, prompts and lengths; or its length policies.

    python jobs/benchmark.py --synthetic 20m --acceptance 0.8 --output runs/benchmark.json
    python jobs/benchmark.py --synthetic 20m --acceptance 0.8 --profile runs/profile
    python jobs/benchmark.py --target T --draft D --prompts FILE --policies all --output runs/policies.json
    python jobs/benchmark.py --update_readme README.md --results runs/benchmark.json

The last line on stdout is a JSON document.
"""

import _package  # noqa: F401

from specdist.cli import benchmark

if __name__ == "__main__":
    benchmark.end()
