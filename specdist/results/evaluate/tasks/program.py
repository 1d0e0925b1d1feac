"""Runs one program written by a model; a script that :mod:`specdist.results.evaluate.tasks.sandbox` starts.

Reads a JSON document on stdin (``program``, ``limits``, ``nonce``), writes a byte to stdout when the time of
the program begins, and the nonce to stderr when it has reached its end. The kernel limits memory, time of the
processor, files and processes; Python's audit hook refuses processes, sockets, and changes outside the
working folder. Imports only the standard library: Python runs it isolated (``-I``), without the project.
"""

import ctypes
import json
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1
REFUSED_EVENTS = (
    "socket.", "subprocess.", "ctypes.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn",
    "os.kill", "pty.", "resource.setrlimit", "resource.prlimit", "os.setxattr", "os.removexattr",
)  # fmt: skip
# Every path given to these must be in the working folder.
PATH_EVENTS = (
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.chown",
    "os.truncate", "os.utime", "shutil.rmtree", "shutil.move", "shutil.copyfile", "shutil.copytree",
)  # fmt: skip
WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def refuse_in_python(folder: str) -> None:
    """Install an audit hook, which cannot be removed."""
    allowed, realpath = (folder + "/", "/dev/null/"), os.path.realpath
    fsdecode, fspath = os.fsdecode, os.fspath

    def hook(event: str, arguments: tuple) -> None:
        if event.startswith(REFUSED_EVENTS):
            raise PermissionError(f"{event} is refused here")
        if event == "open":
            arguments = arguments[:1] if arguments[2] & WRITING_FLAGS else ()
        elif not event.startswith(PATH_EVENTS):
            return
        for path in arguments:
            # A number is an open file, or a mode.
            is_path = path is not None and not isinstance(path, int)
            if is_path and not (realpath(fsdecode(fspath(path))) + "/").startswith(allowed):
                raise PermissionError(f"{event} {path!r} is refused here")

    sys.addaudithook(hook)


if __name__ == "__main__":
    spec = json.load(sys.stdin)
    # It ends with its parent, which may be killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.write(1, b".")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for which, most in spec["limits"]:
        resource.setrlimit(which, (most, most))
    code = compile(spec["program"], "<program>", "exec", dont_inherit=True)
    refuse_in_python(os.path.realpath("."))
    # Not "__main__": code under `if __name__ == "__main__"` is not tested.
    exec(code, {"__name__": "program"})
    os.write(2, spec["nonce"].encode())
    os._exit(0)
