#!/usr/bin/env bash
# The whole thing on one CPU, from nothing: install, train a small pair of models, generate with two
# tensor-parallel target ranks and a draft rank, print what came out, and write a report of it.
#
#   bash jobs/demo.sh [--option value ...]     options of jobs/generate.py, such as --temperature 0
#
# A second run reuses what the first one built and generated; --overwrite generates anew, and has to be given
# together with changed options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/install.sh

# The demo is for every machine: it stays on the CPU where there are GPUs too.
export DS_ACCELERATOR=cpu TOKENIZERS_PARALLELISM=false

# Threads that wait by spinning make training twenty times slower on a machine that does something else too.
OMP_WAIT_POLICY=PASSIVE "$SPECDIST_PYTHON" jobs/train_demo.py --output runs/demo/pair

# One thread each: three ranks that all take every core would only wait for one another.
OMP_NUM_THREADS=1 "$SPECDIST_PYTHON" -m accelerate.commands.launch --config_file jobs/accelerate/cpu.yaml \
    jobs/generate.py --config jobs/configs/demo.yaml "$@"

"$SPECDIST_PYTHON" jobs/show.py runs/demo/output --rows 2
"$SPECDIST_PYTHON" jobs/report.py runs/demo/output >/dev/null
echo
echo "report: $PWD/runs/demo/output/report/report.html"
