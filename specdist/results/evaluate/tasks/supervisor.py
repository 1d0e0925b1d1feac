"""Runs one untrusted program; a script that :mod:`specdist.results.evaluate.tasks.sandbox` starts.

Reads a JSON document on stdin (``program``, ``limits``, ``use_namespaces``, ``use_audit_hook``) and writes
one to stdout (``outcome``, ``detail``, ``isolation``). This process waits; its child runs the program. If the
kernel permits, both are in namespaces of their own: no network but a loopback that is down, files read-only
except an empty working folder in memory, and all processes of the child end with it. Python's audit hook
refuses the same from within, and also sockets of this machine, which are files. Alone it stops accidents and
simple attempts, but not an expert in the interpreter's internals.

Imports only the standard library: Python runs it isolated (``-I``), without the project.
"""

import contextlib
import ctypes
import json
import os
import resource
import secrets
import signal
import sys
import time
from pathlib import Path

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 0x4000, 0x40000
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = -100, 0x8000, 1
SYS_MOUNT_SETATTR = 442  # the same on every architecture
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CAPABILITY_VERSION_3 = 0x20080522
MAX_REPORT_BYTES, MAX_DETAIL_CHARS = 2**15, 500
POLL_S = 0.005

NETWORK, PROCESSES, FILES = "network namespace", "process namespace", "read-only files"
HOOK = "audit hook"

REFUSED_EVENTS = (
    "socket.", "subprocess.", "ctypes.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn",
    "os.kill", "os.startfile", "pty.", "resource.setrlimit", "resource.prlimit",
    "os.listxattr", "os.setxattr", "os.removexattr",
)  # fmt: skip
# Every path given to these must be in the working folder.
PATH_EVENTS = (
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.chown",
    "os.truncate", "os.utime", "shutil.rmtree", "shutil.move", "shutil.copyfile", "shutil.copytree",
)  # fmt: skip
WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

LIBC = ctypes.CDLL(None, use_errno=True)


class MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def supervise(spec: dict) -> dict:
    """Run the program to its end or its time limit."""
    folder, limits = str(Path.cwd()), spec["limits"]
    isolation = enter_namespaces(folder, limits["file_bytes"]) if spec["use_namespaces"] else []
    if spec["use_audit_hook"]:
        isolation.append(HOOK)
    nonce = secrets.token_hex(16)
    report_in, report_out = os.pipe()
    child = os.fork()
    if child == 0:
        run_child(spec, folder, nonce, report_out)
    os.close(report_out)
    status = wait_for(child, limits["wall_s"])
    os.set_blocking(report_in, False)
    try:
        report = os.read(report_in, MAX_REPORT_BYTES)
    except BlockingIOError:
        report = b""
    return {**outcome_of(report, nonce, status), "isolation": isolation}


def outcome_of(report: bytes, nonce: str, status: "int | None") -> dict:
    """Only a report with the nonce is valid: the child writes it after the program has ended."""
    try:
        found = json.loads(report)
        if found["nonce"] == nonce:
            return {"outcome": found["outcome"], "detail": found["detail"]}
    except (ValueError, KeyError, TypeError):
        pass
    if status is None:
        return {"outcome": "timed out", "detail": None}
    code = os.waitstatus_to_exitcode(status)
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return {"outcome": "ended early", "detail": how}


def wait_for(child: int, wall_s: float) -> "int | None":
    """The child's exit status, None if it ran out of time; then its process group is killed."""
    deadline = time.monotonic() + wall_s
    status = None
    while status is None and time.monotonic() < deadline:
        ended, found = os.waitpid(child, os.WNOHANG)
        if ended:
            status = found
        else:
            time.sleep(POLL_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        # It may not have had a group of its own yet.
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return status


def enter_namespaces(folder: str, file_bytes: int) -> "list[str]":
    """What the kernel isolates from here on; empty if it does not let this user."""
    user, group = os.getuid(), os.getgid()
    wanted = CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC
    if LIBC.unshare(wanted) != 0:
        return []
    try:
        write_text("/proc/self/setgroups", "deny")
        write_text("/proc/self/uid_map", f"{user} {user} 1")
        write_text("/proc/self/gid_map", f"{group} {group} 1")
    except OSError:
        return [NETWORK, PROCESSES]
    read_only = MountAttributes(MOUNT_ATTR_RDONLY, 0, 0, 0)
    options = f"size={file_bytes},mode=700".encode()
    is_mounted = (
        LIBC.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None) == 0
        and LIBC.syscall(
            SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(read_only), ctypes.sizeof(read_only)
        ) == 0
        and LIBC.mount(
            b"tmpfs", folder.encode(), b"tmpfs", ctypes.c_ulong(MS_NOSUID | MS_NODEV), options
        ) == 0
    )  # fmt: skip
    os.chdir(folder)
    return [NETWORK, PROCESSES, FILES] if is_mounted else [NETWORK, PROCESSES]


def write_text(path: str, text: str) -> None:
    with open(path, "w") as file:  # noqa: PTH123
        file.write(text)


def run_child(spec: dict, folder: str, nonce: str, report_out: int) -> None:
    """Never returns."""
    try:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        report_out = close_files(report_out)
        give_up_rights()
        set_limits(spec["limits"])
        code = compile(spec["program"], "<program>", "exec", dont_inherit=True)
        if spec["use_audit_hook"]:
            refuse_in_python(folder)
        # Not "__main__": code under `if __name__ == "__main__"` is not tested.
        exec(code, {"__name__": "program"})
        outcome, detail = "passed", None
    except BaseException as error:  # SystemExit too: an early end is not a success
        outcome, detail = "failed", describe(error)
    report = {"outcome": outcome, "detail": detail, "nonce": nonce}
    os.write(report_out, json.dumps(report).encode())
    os._exit(0)


def describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:MAX_DETAIL_CHARS]
    except BaseException:  # its __str__ is the program's
        return type(error).__name__


def close_files(report_out: int) -> int:
    """Close all files but the report, whose new number is returned; standard streams become /dev/null."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    kept = 3
    if report_out != kept:
        os.dup2(report_out, kept)
    for stream in range(kept):
        os.dup2(nowhere, stream)
    os.closerange(kept + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return kept


def give_up_rights() -> None:
    """Give up special rights for good, those of setuid programs and of the new namespace."""
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    LIBC.capset(header, (ctypes.c_uint32 * 6)())


def set_limits(limits: dict) -> None:
    cpu_s = int(limits["wall_s"]) + 1
    wanted = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["num_files"],
        # The kernel does not count the processes of root.
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    for which, value in wanted.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def refuse_in_python(folder: str) -> None:
    """Install an audit hook, which cannot be removed."""
    inside, realpath = os.path.realpath(folder), os.path.realpath
    fspath, is_writing = os.fspath, WRITING_FLAGS

    def is_inside(path: object) -> bool:
        if path is None or isinstance(path, int):  # an open file is not opened again
            return True
        text = os.fsdecode(fspath(path))  # type: ignore[call-overload]
        return (realpath(text) + "/").startswith(inside + "/")

    def hook(event: str, arguments: tuple) -> None:
        if event.startswith(REFUSED_EVENTS):
            raise PermissionError(f"{event} is refused here")
        if event == "open":
            path, mode, flags = arguments
            writes = isinstance(mode, str) and bool(set(mode) & set("wax+"))
            if (writes or flags & is_writing) and path != "/dev/null" and not is_inside(path):
                raise PermissionError(f"writing {path!r} is refused here")
        elif event.startswith(PATH_EVENTS):
            for path in arguments:
                if isinstance(path, (str, bytes)) and not is_inside(path):
                    raise PermissionError(f"{event} {path!r} is refused here")

    sys.addaudithook(hook)


if __name__ == "__main__":
    print(json.dumps(supervise(json.load(sys.stdin))))  # noqa: T201
