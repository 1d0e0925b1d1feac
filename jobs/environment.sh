# Functions of the scripts that make environments; they source it.
set -euo pipefail

fail() {
    printf 'error: %s\n' "$@" >&2
    exit 1
}

# Such as 3.12, of an interpreter ($1).
version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'
}

# An environment ($1), without pip, that finds what is installed in it first, and then what a Python ($2) has.
borrow_environment() {
    "$2" -m venv --without-pip "$1"
    local packages
    packages="$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    "$2" -c '
import sys
for place in sys.path:
    if place.endswith(("site-packages", "dist-packages")):
        print(f"import site; site.addsitedir({place!r})")' >"$packages/borrowed.pth"
}

# The requirement of torch as a file of constraints ($1) has it, built for a CUDA ($2); nothing without one.
torch_build() {
    local version
    version="$(sed -n 's/^torch==//p' "$1")"
    case "$2" in
    "") ;;
    cu130) echo "torch===$version" ;; # the plain wheel, and no local version of it
    cpu | cu[0-9]*) echo "torch==$version+$2" ;;
    *) fail "$2 is not a build of torch: cu126, cu128, cu130 or cpu" ;;
    esac
}
