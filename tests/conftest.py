"""One thread per process: the tests run real ranks beside each other on few cores.

Without a GPU the project's kernels run in Triton's interpreter. It must be asked for before anything imports
Triton, and transformers does.
"""

import gc
import logging
import os
import shutil
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
# While tests are imported the garbage collector takes a seventh of the time, and finds nothing.
gc.disable()
# Nothing is kept from one test to the next, nor in the user's home.
os.environ["SPECDIST_COSTS"] = "off"
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"

# The files that take longest, as `--durations 50` shows. They begin after those of many tests, which are
# fast, and before the small ones, with which all workers end at about the same time.
MANY_TESTS = 30
LONG = {
    "gpu/test_engine.py", "gpu/test_first_day.py", "job/test_buckets.py", "job/test_crash.py",
    "job/test_faults.py", "job/test_gpt_pairs.py", "job/test_signals.py", "job/test_waiting.py",
    "models/test_parity.py", "models/test_precision.py", "slurm/test_run.py", "test_mutants.py",
}  # fmt: skip
# What is long and rarely changes: `bash tests/run.sh --all` runs it, and so does its file's name. Engine runs
# on the fake GPU (its rules, counts and memory are tested in each run), and families one by one.
RARE = {"gpu/test_engine.py", "gpu/test_first_day.py", "models/test_family_runs.py"}
NUM_SLOWEST = 20
TESTS = Path(__file__).parent
# Where the interpreter would look for what a script of jobs/ imports; tests run them by runpy.
sys.path.append(str(TESTS.parent / "jobs"))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tiny pair of models of :mod:`tests.job.pair`, only to be read."""
    from tests.job.pair import build_pair

    return build_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(autouse=True)
def loggers_as_imported() -> None:
    """Commands set levels and handlers of the loggers: no test sees those that another test,
    or a shared fixture, has left."""
    for handler in logging.root.handlers[:]:
        if type(handler).__module__ != "_pytest.logging":
            logging.root.removeHandler(handler)
    # Setting a level empties the caches of all loggers.
    if logging.root.level != logging.WARNING:
        logging.root.setLevel(logging.WARNING)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "specdist" and isinstance(logger, logging.Logger):
            logger.handlers.clear()
            if logger.level != logging.NOTSET:
                logger.setLevel(logging.NOTSET)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole files in the order in which workers shall begin them, see run.sh."""
    sizes = Counter(item.path for item in items)

    def place(item: pytest.Item) -> tuple[int, int, str]:
        size, name = sizes[item.path], item.path.relative_to(TESTS).as_posix()
        stage = 1 if name in LONG else 0 if size > MANY_TESTS else 2
        return stage, -size, name

    items.sort(key=place)
    for item in items:
        if item.path.relative_to(TESTS).as_posix() in RARE:
            item.add_marker("rare")
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The files that took longest, in seconds of one worker, with what was built for them."""
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section(f"slowest {NUM_SLOWEST} files, {sum(seconds.values()):,.0f} s in all")
    for name in sorted(seconds, key=lambda name: -seconds[name])[:NUM_SLOWEST]:
        terminalreporter.line(f"{seconds[name]:8.1f} s  {name}")
