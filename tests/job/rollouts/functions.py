"""Functions between turns, right and wrong, for tests/job/rollouts/test_pool.py."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time

from specdist import rollout

sys.stdout.write("a line of the module\n")


def check(row, messages):
    what = row["what"]
    if what == "raise":
        return rollout.accept(score=float("nan"))
    if what == "sys.exit":
        sys.exit(4)
    if what == "os._exit":
        os._exit(3)
    if what == "crash":
        ctypes.string_at(0)
    if what == "signals":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
    if what == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        if "pids" in row:
            row["pids"].write_text(f"{os.getpid()} {child.pid}")
        time.sleep(300)
    if what == "text":
        return messages[-1]["content"]
    gpus = os.environ["CUDA_VISIBLE_DEVICES"]
    return rollout.accept(big=row.get("big"), gpus=gpus, pid=os.getpid())


async def wait(row, messages):
    await asyncio.sleep(0.01)
    return rollout.messages([{"role": "user", "content": f"{row['what']} {messages[-1]['content']}"}])
