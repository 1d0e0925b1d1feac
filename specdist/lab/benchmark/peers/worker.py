"""One engine of a peer in a process of its own, in an environment of its own: JSON lines in, JSON lines out.

    python -I worker.py vllm_engine

The first line has the :class:`Options` of the module's ``Engine``; each of the others is a call of its
methods. The environment has no specdist.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Options:
    """What an engine is for: its models (without a draft, the target alone), the most sequences at a time and
    tokens of one, rules for samples, and a folder for what it converts, which all engines of a run share."""

    target: str
    draft: str | None
    num_draft_tokens: int
    dtype: str
    max_num_seqs: int
    max_seq_len: int
    stop_token_ids: list[int]
    sampling: dict[str, Any]
    seed: int
    folder: str


def serve(
    engine_of: Callable[..., Any], lines: Iterator[str], answer: Callable[[dict[str, Any]], None]
) -> None:
    """The first line makes the engine, every other one a call. An error is answered, and ends it."""
    try:
        engine = engine_of(Options(**json.loads(next(lines))))
        answer({"version": engine.version})
        while True:
            line = next(lines, None)
            if line is None:
                return
            call, arguments = json.loads(line)
            answer({"found": getattr(engine, call)(**arguments)})
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    """What the engine prints goes to stderr, so that stdout has answers alone."""
    os.setpgrp()  # one group with what the engine starts: all of it is stopped between calls
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
