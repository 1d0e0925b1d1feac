#!/usr/bin/env bash
# Everything that has to pass: lint, format, types, tests; and how large the package is.
#
#   bash tests/run.sh [pytest arguments ...]     such as -k demo, or -m 'not slow'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/install.sh

"$SPECDIST_PYTHON" -m ruff check
"$SPECDIST_PYTHON" -m ruff format --check
# Types take one core for a while: tests begin beside them.
"$SPECDIST_PYTHON" -m mypy &
types=$!
"$SPECDIST_PYTHON" -m tests.lines
# Where an environment forbids it, some hundred processes would compile the package anew.
unset PYTHONDONTWRITEBYTECODE
# Four files at a time on two cores: tests wait for processes and disks about as long as they compute. A file stays
# together, for what it builds once; in which order files begin says tests/conftest.py.
OMP_NUM_THREADS=1 "$SPECDIST_PYTHON" -m pytest -n 4 --dist loadfile --no-loadscope-reorder "$@" ||
    failed=$?
wait "$types"
exit "${failed:-0}"
