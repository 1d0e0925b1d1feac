#!/usr/bin/env bash
# For nodes without a network: a folder with the repository and the packages that it needs.
#
#   bash jobs/offline.sh pack FOLDER [--python 3.12] [--cuda cu130] [--extras node]     where there is a network
#   bash jobs/offline.sh install [FOLDER]                                     on the node, which has the folder
#
# --python   the node's version (default: that of PYTHON, which is python3 if it is not set)
# --cuda     what torch's wheel is built for, as SPECDIST_CUDA says to jobs/install.sh: cu130 (default; for drivers
#            from 580 on), cu126, cu128 or cpu; none: without torch, which the node has
# --extras   of pyproject.toml, with commas between (default: node, for tests/gpu/first_day.py)
# --vllm     a version, 0.33.0 say, of vLLM for jobs/benchmark.py: some 6 GB, since it brings a torch of its own
#
# pack writes the last commit, wheels/ and, where it has been trained, the demo pair: copy the folder to the node.
# install makes .venv in it. What PYTHON has there in a version that the project supports, an image's torch say, is used
# as it is; the rest comes from wheels/ and nothing from the network. Jobs and scripts then work as elsewhere. vLLM's
# environment is .venv-vllm, where jobs/benchmark.py finds it.
set -euo pipefail
here="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/environment.sh

# pip leaves markers such as python_version < "3.12" to the interpreter that runs it, whatever --python-version says.
PIP_FOR='
import sys
from pip._vendor.packaging import markers
ordinary, version = markers.default_environment, sys.argv.pop(1)
markers.default_environment = lambda: {**ordinary(), "python_version": version, "python_full_version": f"{version}.0"}
from pip._internal.cli.main import main
sys.exit(main(sys.argv[1:]))'
# Of these there are sources alone, from which one wheel for all Pythons is made.
SOURCES=(deepspeed rouge-score)

pack() {
    local folder="$1" python="${PYTHON:-python3}" version= cuda=cu130 extras=node vllm=
    shift
    while (($#)); do
        case "$1 ${2:-}" in
        "--python 3."*) version="$2" ;;
        "--cuda none" | "--cuda cpu" | "--cuda cu"*) cuda="$2" ;;
        "--extras "?*) extras="$2" ;;
        "--vllm "[0-9]*) vllm="$2" ;;
        *) fail "$* is not understood: --python 3.12, --cuda cu126, cu128, cu130, cpu or none, --extras node," \
            "--vllm 0.33.0" ;;
        esac
        shift 2
    done
    version="${version:-$(version_of "$python")}"
    [[ ! -e $folder || -z "$(ls -A "$folder")" ]] || fail "$folder is not empty: name a new folder"
    [[ -z "$(git status --porcelain --untracked-files=no)" ]] ||
        echo "warning: the last commit is packed, and what has changed since then is not" >&2

    mkdir -p "$folder/wheels" "$folder/runs/demo"
    git archive HEAD | tar -x -C "$folder"
    [[ ! -d runs/demo/pair ]] || cp -r runs/demo/pair "$folder/runs/demo"
    local wheels constraints=jobs/constraints-cuda.txt pins=() platforms=() name number
    wheels="$(cd "$folder/wheels" && pwd)"
    printf '%s\n' "$version" >"$wheels/python"
    printf '%s\n' "$extras" >"$wheels/extras"
    for name in "${SOURCES[@]}"; do
        pins+=("$(grep "^$name==" "$constraints")")
    done
    "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$wheels" "${pins[@]}"
    # pip prefers the first: wheels that run on old systems, too.
    for number in _2_{28..17} 2014 _2_{16..5} 2010 1 _2_{29..34}; do
        platforms+=(--platform "manylinux${number}_$(uname -m)")
    done
    platforms+=(--platform "linux_$(uname -m)")
    local download=("$python" -c "$PIP_FOR" "$version" download --quiet --disable-pip-version-check
        --only-binary=:all: --implementation cp --python-version "$version" "${platforms[@]}")
    # Without torch, too, it says which versions of the others there are.
    "${download[@]}" --dest "$wheels" --find-links "$wheels" --constraint "$constraints" ".[$extras]" \
        pip 'setuptools>=77' "$(torch_build "$constraints" "${cuda/none/cu130}")" ||
        fail "pip does not find what it names for Python $version and $cuda: where it is torch, set" \
            "PIP_EXTRA_INDEX_URL to the URL that torch's installation page gives for this CUDA"
    [[ $cuda != none ]] || rm -f "$wheels"/{torch,triton,nvidia_*,cuda_*}-*.whl
    [[ -z $vllm ]] || "${download[@]}" --dest "$folder/wheels-vllm" "vllm==$vllm" ||
        fail "pip does not find vLLM $vllm for Python $version: name another version, or pack without --vllm"
    du -sh "$folder"
    echo "copy it to the node, and run there: bash $(basename "$folder")/jobs/offline.sh install"
}

install() {
    [[ -d wheels ]] || fail "$PWD has no folder wheels: name the one that jobs/offline.sh pack has made"
    local version
    version="$(<wheels/python)"
    if [[ -z "${PYTHON:-}" ]]; then
        PYTHON=python3
        [[ "$(version_of python3)" == "$version" ]] || PYTHON="python$version"
    fi
    [[ "$(version_of "$PYTHON")" == "$version" ]] ||
        fail "$PWD is packed for Python $version, and PYTHON=$PYTHON is another: pack --python takes its version"
    unset SPECDIST_PYTHON
    source jobs/install.sh
    "$SPECDIST_PYTHON" -c "$REPORT" "$PYTHON"
    [[ -d wheels-vllm ]] || return 0
    "$PYTHON" -m venv --without-pip .venv-vllm
    PYTHONPATH="$(echo "$PWD"/wheels/pip-*.whl)" .venv-vllm/bin/python -m pip install --quiet \
        --disable-pip-version-check --no-index --find-links "$PWD/wheels-vllm" vllm
    echo "vLLM for jobs/benchmark.py is in .venv-vllm"
}

# What an environment has of its own and what it borrows; of the latter only what the project itself asks for.
REPORT='
import importlib.metadata, re, sys
from pathlib import Path

own, borrowed = {}, {}
for found in importlib.metadata.distributions():
    is_own = Path(sys.prefix).resolve() in Path(found.locate_file("")).resolve().parents
    (own if is_own else borrowed).setdefault(found.name.lower().replace("_", "-"), found.version)
needed = {re.match(r"[\w-]+", line)[0] for line in importlib.metadata.requires("specdist") if "extra ==" not in line}
used = [f"{name} {borrowed[name]}" for name in sorted(needed & borrowed.keys() - own.keys())]
print("used as it is there:", ", ".join(used) or "nothing")
del own["specdist"]
instead = {name: f" (there: {borrowed[name]})" for name in own.keys() & borrowed.keys()}
print("installed:", ", ".join(f"{name} {own[name]}{instead.get(name, str())}" for name in sorted(own)))

import torch
from specdist.job.ranks.topology import why_no_gpu

count = torch.cuda.device_count()
print(f"torch {torch.__version__} sees", f"{count} GPUs" if count else f"no GPU: {why_no_gpu()}")'

# Folders are named from where this was called.
folder="${2:-}"
[[ -z $folder || $folder == /* ]] || folder="$here/$folder"
case "${1:-}" in
pack)
    [[ -n ${2:-} && $2 != --* ]] || fail "pack takes a folder: bash jobs/offline.sh pack FOLDER"
    pack "$folder" "${@:3}"
    ;;
install)
    [[ -z $folder ]] || cd "$folder"
    install
    ;;
*) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "jobs/offline.sh" ;;
esac
