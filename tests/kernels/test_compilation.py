"""Every kernel compiles for the GPUs that the project is for, and fits into their registers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

REPOSITORY = Path(__file__).parents[2]
RECORDED = REPOSITORY / "tests/kernels/compiled.json"
MAX_REGISTERS = 255
# Of a multiprocessor of sm_80; the others have more.
MAX_SHARED_BYTES = 163 * 1024


# Instructions and barriers in a step of the only loop of sampling, in which a program is alone with a row's
# list; on sm_80 the compiler turns outer loops into what looks like an inner one.
MOST_IN_LOOPS = {"search": (300, 0)}
# Bytes of a thread. On an H200 tiles of attention that keep a few numbers there, with four warps, took half
# the time of those with eight, which need none (jobs/benchmarks/h200).
MOST_STACK = {"attend": 256, "join": 16}


@pytest.mark.slow
def test_kernels_fit_into_every_gpu(tmp_path: Path) -> None:
    """In a process of its own: this one interprets the kernels. What was compiled when compiled.json was
    written, and has not changed since, is not compiled again."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compilation", "--known", str(RECORDED)],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {resources["capability"] for resources in found} == {80, 90, 100}
    shown = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert {one["name"] for one in found} == {one["name"] for one in shown}, "write compiled.json anew"
    for resources in found:
        name = re.split("[, ]", resources["name"])[0]
        assert resources["stack_bytes"] <= MOST_STACK.get(name, 0), resources
        assert resources["registers"] <= MAX_REGISTERS, resources
        assert resources["shared_bytes"] <= MAX_SHARED_BYTES, resources
        most = MOST_IN_LOOPS.get(name)
        if most is not None and resources["capability"] > 80:
            assert resources["loop_instructions"] <= most[0], resources
            assert resources["loop_barriers"] <= most[1], resources
