"""What a forked process runs. Importing it imports all that the job needs."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

# What the job comes to import by itself, here once instead of in every process.
import pandas as pd  # noqa: F401
import pyarrow.compute
import pyarrow.pandas_compat  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

from specdist.job.generate import main as generate
from tests.job.launching import Main

# A damaged length must not take the machine's memory.
MAX_ADDRESS_BYTES = 32 * 2**30


def run_quietly(arguments: list[str], main: Main = generate) -> None:
    """For a process that is to be killed."""
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        sys.stdout = sys.stderr = nowhere
        sys.exit(main(arguments))


def run_and_tell(arguments: list[str], told: Path, main: Main = generate) -> None:
    """What the job says, libraries and the interpreter's own last words included, goes into a file."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
    with told.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main(arguments))
