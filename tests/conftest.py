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
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"

# The files that take longest, in seconds of a busy machine with two cores, as each run shows them: they begin
# first, and ``--quick`` leaves them out.
LONG = {
    "random_runs/test_random_runs.py": 356, "job/test_faults.py": 306, "engine/test_recurrent.py": 247,
    "slurm/test_run.py": 128, "gpu/test_counts.py": 111, "engine/test_distribution.py": 90,
    "training/drafts/test_distill.py": 90, "training/collect/test_resume.py": 79, "models/test_parity.py": 78,
    "engine/test_policies.py": 77, "job/test_waiting.py": 74, "lab/test_benchmark.py": 74,
    "job/test_orphans.py": 71, "models/test_loading_check.py": 66, "lab/plan/test_job.py": 65,
    "job/test_buckets.py": 62, "test_mutants.py": 56, "kernels/test_sampling.py": 56,
    "engine/test_identity.py": 54, "engine/test_greedy.py": 50, "engine/test_slices.py": 50,
    "models/test_quantized.py": 50, "models/test_precision.py": 50, "kernels/test_paged_attention.py": 50,
    "job/test_end_to_end.py": 50, "models/test_mixtures.py": 50, "job/test_gpt_pairs.py": 50,
    "job/test_crash.py": 50, "test_offline.py": 50, "job/test_mixtures.py": 50, "engine/test_latents.py": 48,
    "test_readme_commands.py": 46, "job/test_row_options.py": 45, "job/test_replicas.py": 45,
    "kubernetes/test_job.py": 42, "job/test_signals.py": 42, "job/test_recurrent.py": 41,
    "models/test_latent.py": 37, "job/test_invariance.py": 37, "models/drafters/test_recorded.py": 35,
    "results/report/test_page.py": 35, "lab/emulation/test_modes.py": 35, "job/test_block_drafters.py": 35,
    "job/test_turns.py": 35, "models/test_quantized_experts.py": 35, "job/test_goodput.py": 35,
    "engine/test_branches.py": 35, "engine/test_constraints.py": 35, "engine/test_heads.py": 30,
    "engine/test_rope_borders.py": 25, "engine/test_processing.py": 25, "engine/test_mtp.py": 25,
    "training/heads/test_training.py": 33, "job/test_eagle.py": 33,
    "job/test_heads.py": 33, "engine/test_detokenizer.py": 32,
}  # fmt: skip
# What is long and rarely changes: `bash tests/run.sh --all` runs it, and so does its file's name. Engine runs
# on the fake GPU (its rules, counts and memory are tested in each run), families one by one, and an image.
RARE = {
    "gpu/test_engine.py", "gpu/test_first_day.py", "models/test_family_runs.py", "lab/plan/test_public.py",
    "kubernetes/test_image.py",
}  # fmt: skip
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

    def place(item: pytest.Item) -> tuple[bool, int, int, str]:
        name = item.path.relative_to(TESTS).as_posix()
        return name not in RARE, -LONG.get(name, 0), -sizes[item.path], name

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
