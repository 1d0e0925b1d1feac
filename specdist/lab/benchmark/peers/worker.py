"""One engine of a peer in a process of its own, in an environment of its own: JSON lines in, JSON lines out.

    python -I worker.py vllm_engine

The first line has the options of the module's ``Engine``; each of the others is a call of its methods. An
answer says how much processor time was used before the call. The environment has no specdist.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def serve(
    engine_of: Callable[..., Any], lines: Iterator[str], answer: Callable[[dict[str, Any]], None]
) -> None:
    """The first line makes the engine, every other one a call. An error is answered, and ends it."""
    try:
        engine = engine_of(**json.loads(next(lines)))
        answer({"version": engine.version})
        while True:
            idle_since, used = time.monotonic(), time.process_time()
            line = next(lines, None)
            if line is None:
                return
            share = (time.process_time() - used) / max(time.monotonic() - idle_since, 1.0)
            call, arguments = json.loads(line)
            answer({"found": getattr(engine, call)(**arguments), "idle_cpu_share": share})
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    """What the engine prints goes to stderr, so that stdout has answers alone."""
    # Last, so that no module of this folder is found instead of one of the environment.
    sys.path.append(str(Path(__file__).parent))
    module = importlib.import_module(sys.argv[1])
    os.environ.update(module.ENVIRONMENT)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def answer(document: dict[str, Any]) -> None:
            answers.write(json.dumps(document) + "\n")
            answers.flush()

        serve(module.Engine, iter(sys.stdin.readline, ""), answer)


if __name__ == "__main__":
    main()
