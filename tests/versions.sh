#!/usr/bin/env bash
# Parts of the suite with other versions of packages than the constraints give:
#
#   bash tests/versions.sh torch==2.11.0 transformers==5.17.0 [-- TEST ...]
#
# An environment in runs/versions/ has these, with what they need, and borrows the rest from .venv. pip's own variables
# say where it finds wheels; torch's plain one brings gigabytes of CUDA libraries along, so name the index of its CPU
# builds in PIP_EXTRA_INDEX_URL. The last line is what stands in the constraints' header.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/install.sh

# What touches torch and transformers most. Kernels are compiled for devices with one version of Triton only.
PARTS=(tests/models tests/kernels tests/engine tests/sampling tests/policies/test_ngrams.py tests/results/api
    --ignore=tests/kernels/test_compilation.py tests/job/test_{end_to_end,few_packages,eagle,texts,special_tokens}.py
    tests/job/test_{quantized,constraints,model_refusals}.py)

wanted=()
while (($#)) && [[ $1 != -- ]]; do
    wanted+=("$1")
    shift
done
shift || true
(($#)) || set -- "${PARTS[@]}"
((${#wanted[@]})) || fail "name versions: bash tests/versions.sh torch==2.11.0 transformers==5.17.0"

name="${wanted[*]//==/-}"
environment="runs/versions/${name// /-}"
if [[ ! -e $environment/complete ]]; then
    rm -rf "$environment"
    mkdir -p runs/versions
    borrow_environment "$environment" "$SPECDIST_PYTHON"
    # Where pins exclude what these versions need, pip chooses.
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "${wanted[@]}"
    touch "$environment/complete"
fi
python="$environment/bin/python"
set +e
OMP_NUM_THREADS=1 "$python" -m pytest -n 2 --dist loadfile -q "$@" | tee "$environment/log"
code=${PIPESTATUS[0]}
set -e
counts="$(tail -n 1 "$environment/log" | sed 's/ in .*//; s/^=* //')"
echo "# ${wanted[*]}, Python $(version_of "$python"), $(date +%F): $counts ($*)"
exit "$code"
