#!/usr/bin/env bash
# The whole pipeline on one CPU, from scratch: install, train a small pair of models, generate with two
# tensor-parallel target ranks and a draft rank, print some results, and write a report.
#
#   bash jobs/demo.sh [--option value ...]           options of jobs/generate.py, such as --temperature 0
#   bash jobs/demo.sh --gpu [--option value ...]     a public pair of 8B and 0.6B on one GPU instead, from
#                                                    jobs/configs/qwen3-8b.yaml: 18 GB are downloaded
#
# A second run reuses what the first one built and generated; --overwrite generates again, and must be given
# together with changed options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/install.sh

if [[ ${1:-} == --gpu ]]; then
    "$SPECDIST_PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        fail "demo.sh --gpu needs a GPU, and torch sees none here: leave --gpu out for the demo on a CPU"
    echo "Qwen3 8B and 0.6B: 18 GB are downloaded the first time, unless they are in the cache of the hub"
    "$SPECDIST_PYTHON" jobs/generate.py --config jobs/configs/qwen3-8b.yaml "${@:2}" >/dev/null
    exec "$SPECDIST_PYTHON" jobs/show.py runs/qwen3-8b --rows 3
fi

# The demo runs on every machine, so it stays on the CPU even if there are GPUs.
export DS_ACCELERATOR=cpu TOKENIZERS_PARALLELISM=false

# Threads that spin while waiting make training twenty times slower on a machine that is also busy otherwise.
OMP_WAIT_POLICY=PASSIVE "$SPECDIST_PYTHON" jobs/train_demo.py --output runs/demo/pair

# One thread each: three ranks that all take every core would only wait for one another.
OMP_NUM_THREADS=1 "$SPECDIST_PYTHON" jobs/generate.py --config jobs/configs/demo.yaml "$@" >/dev/null

"$SPECDIST_PYTHON" jobs/report.py runs/demo/output >/dev/null

# One screen of what came of it; jobs/generate.py has printed the same figures as one JSON line on stdout.
echo
"$SPECDIST_PYTHON" jobs/show.py runs/demo/output --rows 3
echo
echo "report      $PWD/runs/demo/output/report/report.html"
