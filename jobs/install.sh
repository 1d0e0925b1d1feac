#!/usr/bin/env bash
# Install the project and its dependencies into a virtual environment in .venv, with the versions
# of jobs/constraints-cuda.txt if nvidia-smi is found, otherwise of jobs/constraints-cpu.txt.
#
#   bash jobs/install.sh       install, nothing else
#   source jobs/install.sh     from a script: it then runs "$SPECDIST_PYTHON"
#
# SPECDIST_PYTHON=/path/to/python   use this environment, which has the project already; nothing is installed
# PYTHON=python3.12                 the interpreter that makes .venv (default: python3)
#
# It does nothing if .venv was created from the same pyproject.toml and constraints.
set -euo pipefail

SPECDIST_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() {
    printf 'error: %s\n' "$@" >&2
    exit 1
}

make_environment() {
    local python="${PYTHON:-python3}"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "PYTHON=$python is older than Python 3.10: set PYTHON to a newer one"
    "$python" -c 'import ensurepip, venv' ||
        fail "$python cannot create virtual environments: install its venv module (on Debian: python3-venv)"
    "$python" -m venv .venv
}

install_project() {
    local stamp=.venv/specdist-installed wanted
    local constraints=jobs/constraints-cpu.txt
    command -v nvidia-smi >/dev/null && constraints=jobs/constraints-cuda.txt
    local pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint "$constraints"
        -e '.[dev]')

    # The folder is part of the stamp because an environment copied with its repository still imports the old one.
    wanted="$PWD: ${pip[*]}"$'\n'"$(sha256sum pyproject.toml "$constraints")"
    if [[ -x .venv/bin/python && -f $stamp && "$(<"$stamp")" == "$wanted" ]]; then
        return
    fi
    [[ -x .venv/bin/python ]] || make_environment
    echo "installing the project into $PWD/.venv (the first time takes a few minutes)"
    rm -f "$stamp"
    "${pip[@]}"
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
