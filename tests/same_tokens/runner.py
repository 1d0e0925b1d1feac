"""Runs jobs of one tree, each as processes forked from this one, which has imported what they need.

    python tests/same_tokens/runner.py TREE        (PYTHONPATH=TREE)

Reads a JSON object a line, ``{"arguments": [...], "num_ranks": n, "output": FOLDER, "is_killed": bool}``, and
answers with one, ``{"code": n, "words": str}``. Of the tree it knows ``jobs/generate.py`` and its options, so
that it runs trees whose modules have other names.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import socket
import sys
import tempfile
import time
from pathlib import Path

LIBRARIES = (
    "deepspeed", "pandas", "transformers.models.llama.modeling_llama", "llguidance", "specdist.job.generate",
)  # fmt: skip
LIMIT_S = 200
POLL_S = 0.02


def main(tree: Path) -> None:
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    job = tree / "jobs" / "generate.py"
    sys.path[0] = str(job.parent)  # as if it had been started itself
    print(json.dumps({"tree": sys.modules["specdist"].__file__}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        with tempfile.TemporaryFile("w+") as words:
            code = _run(job, asked, words.fileno())
            words.seek(0)
            print(json.dumps({"code": code, "words": words.read()[-3000:]}), flush=True)


def _run(job: Path, asked: dict[str, object], words: int) -> int:
    """The exit code of the first rank that failed, or 0; the others are then killed."""
    num_ranks, shards = int(str(asked["num_ranks"])), Path(str(asked["output"])) / "shards"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = {}
    for rank in range(num_ranks):
        process = os.fork()
        if process == 0:
            for stream in (1, 2):
                os.dup2(words, stream)
            if num_ranks > 1:
                os.environ |= {"WORLD_SIZE": str(num_ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            _rank(job, list(asked["arguments"]))  # type: ignore[call-overload]
        ranks[process] = rank
    failed, ends_s = 0, time.monotonic() + LIMIT_S
    while ranks:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            del ranks[process]
            failed = failed or os.waitstatus_to_exitcode(status)
        is_due = asked["is_killed"] and any(shards.rglob("*.arrow"))
        if failed or is_due or time.monotonic() > ends_s:
            for each in ranks:
                os.kill(each, 9)
                os.waitpid(each, 0)
            return failed or -9
        time.sleep(0 if process else POLL_S)
    return failed


def _rank(job: Path, arguments: list[str]) -> None:
    """Of a forked process: it ends here."""
    sys.argv = [str(job), *arguments]
    code = 1
    try:
        runpy.run_path(str(job), run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
