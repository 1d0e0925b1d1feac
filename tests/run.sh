#!/usr/bin/env bash
# What has to pass: lint, format, types, tests; and that the package is not larger than was reached.
#
#   bash tests/run.sh [pytest arguments ...]   such as -k demo, or --durations 50
#   bash tests/run.sh --quick                  lint, types of changed files, the tests of a change (tests/quick.py)
#   bash tests/run.sh --all                    also what is long and rarely changes (RARE in tests/conftest.py), and
#                                              every planted fault (tests/mutants)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/install.sh

"$SPECDIST_PYTHON" -m ruff check
"$SPECDIST_PYTHON" -m ruff format --check
if [[ "${1:-}" == --quick ]]; then
    "$SPECDIST_PYTHON" -m tests.lines --check >/dev/null
    OMP_NUM_THREADS=1 exec "$SPECDIST_PYTHON" -m tests.quick
fi
which="not rare"
if [[ "${1:-}" == --all ]]; then
    which=""
    shift
    OMP_NUM_THREADS=1 "$SPECDIST_PYTHON" -m tests.mutants
fi
# Types take one core for a while: tests begin beside them.
"$SPECDIST_PYTHON" -m mypy &
types=$!
"$SPECDIST_PYTHON" -m tests.lines --check
# Where an environment forbids it, some hundred processes would compile the package anew.
unset PYTHONDONTWRITEBYTECODE
# Four files at a time on two cores: tests wait for processes and disks about as long as they compute. A file stays
# together, for what it builds once; in which order files begin says tests/conftest.py.
OMP_NUM_THREADS=1 "$SPECDIST_PYTHON" -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m "$which" "$@" ||
    failed=$?
wait "$types"
exit "${failed:-0}"
