"""Compare length policies, placements of the draft, and single passes: ``python -m tests.lab.benchmark``.

    python -m tests.lab.benchmark --target T --draft D --prompts FILE --policies all --output policies.json
    python -m tests.lab.benchmark --synthetic 20m --acceptance 0.8 --placements separate --output own.json

What ``jobs/benchmark.py`` compares, too, and all that it can.
"""

from __future__ import annotations

from specdist.cli import Command

main = Command(
    "benchmark", "compare policies and placements",
    "tests.lab.benchmark.config:ComparisonConfig", "tests.lab.benchmark.run:compare",
    program="python -m tests.lab.benchmark", logs=True,
)  # fmt: skip

if __name__ == "__main__":
    main.end()
