#!/usr/bin/env bash
# Install the project and its dependencies into a virtual environment in .venv, with the versions
# of jobs/constraints-cuda.txt if nvidia-smi is found, otherwise of jobs/constraints-cpu.txt.
#
#   bash jobs/install.sh       install, nothing else
#   source jobs/install.sh     from a script: it then runs "$SPECDIST_PYTHON"
#
# SPECDIST_PYTHON=/path/to/python   use this environment, which has the project already; nothing is installed
# PYTHON=python3.12                 the interpreter that makes .venv (default: python3)
# SPECDIST_CUDA=cu126               torch built for this CUDA (cu126, cu128, ..., cpu), for a driver that is too old
#                                   for the plain wheel's 13.0. These wheels lie in indexes of their own: set
#                                   PIP_EXTRA_INDEX_URL to the URL that torch's installation page gives
#
# It does nothing if .venv was created from the same pyproject.toml and constraints. Where jobs/offline.sh has brought
# a folder wheels/, packages come from there alone, and only those that PYTHON has not in a supported version.
set -euo pipefail

SPECDIST_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$SPECDIST_ROOT/jobs/environment.sh"

make_environment() {
    local python="${PYTHON:-python3}"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "PYTHON=$python is older than Python 3.10: set PYTHON to a newer one"
    if [[ -d wheels ]]; then
        borrow_environment .venv "$python"
        return
    fi
    "$python" -c 'import ensurepip, venv' ||
        fail "$python cannot create virtual environments: install its venv module (on Debian: python3-venv)"
    "$python" -m venv .venv
}

install_project() {
    local stamp=.venv/specdist-installed wanted torch remedy
    local constraints=jobs/constraints-cpu.txt
    command -v nvidia-smi >/dev/null && constraints=jobs/constraints-cuda.txt
    local pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile)
    if [[ -d wheels ]]; then
        # pip itself is one of the wheels.
        pip=(env "PYTHONPATH=$(echo "$PWD"/wheels/pip-*.whl)" "${pip[@]}" --no-index --find-links "$PWD/wheels"
            -e ".[$(<wheels/extras)]")
        remedy="wheels/ lacks what pip names: jobs/offline.sh pack has --python, --cuda and --extras"
    else
        torch="$(torch_build "$constraints" "${SPECDIST_CUDA:-}")"
        pip+=(--constraint "$constraints" -e '.[dev]' ${torch:+"$torch"})
        remedy="${torch:+$torch comes from the index in PIP_EXTRA_INDEX_URL; }pip has said why"
    fi

    # The folder is part of the stamp because an environment copied with its repository still imports the old one.
    wanted="$PWD: ${pip[*]}"$'\n'"$(sha256sum pyproject.toml "$constraints")"
    if [[ -x .venv/bin/python && -f $stamp && "$(<"$stamp")" == "$wanted" ]]; then
        return
    fi
    [[ -x .venv/bin/python ]] || make_environment
    echo "installing the project into $PWD/.venv (the first time takes a few minutes)"
    rm -f "$stamp"
    "${pip[@]}" || fail "the installation has failed: $remedy"
    # On all cores, as pip does not; some packages have files for other versions of Python.
    .venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
    printf '%s\n' "$wanted" >"$stamp"
}

if [[ -z "${SPECDIST_PYTHON:-}" ]]; then
    pushd "$SPECDIST_ROOT" >/dev/null
    install_project
    popd >/dev/null
    SPECDIST_PYTHON="$SPECDIST_ROOT/.venv/bin/python"
elif ! "$SPECDIST_PYTHON" -c 'import specdist'; then
    fail "SPECDIST_PYTHON=$SPECDIST_PYTHON cannot import specdist: install the project there (pip install -e .)," \
        "or unset SPECDIST_PYTHON to create .venv"
fi
