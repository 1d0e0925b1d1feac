"""The steps of :mod:`tests.gpu.first_day`, each a command that can also be typed by hand, in their order.

Those come first that need no other and of which a failure, or a figure, tells most; what loads a large model
is last.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.gpu.first_jobs import (
    CHECKS,
    PYTHON,
    SHARED,
    Jobs,
    Step,
    failing_steps,
    large_step,
    launcher,
    long_steps,
    one_gpu_steps,
    sharded_steps,
)
from tests.gpu.guard import why_not

# Over how many GPUs sums are measured.
NUM_RANKS = (2, 4, 8)
TESTS = [PYTHON, "-m", "pytest", "-v", "-p", "no:cacheprovider"]


def plan(
    output: Path,
    pair: Path | None,
    *,
    device: str,
    num_gpus: int = 1,
    large: tuple[str, str] | None = None,
) -> list[Step]:
    """All steps, in their order.

    Args:
        device: of the jobs; with "cpu" measurements are on the fake device.
        num_gpus: of this node, which decides over how many sums and the long prompts are run.
        large: target and draft of the last job.
    """
    shares_gpu = num_gpus == 1 and device == "cuda"
    jobs = Jobs(output, pair or output / "pair", device, shares_gpu=shares_gpu)
    steps = [
        Step(name="versions", limit_s=120, runs_on_cpu=True,
             title="libraries, devices and how they are connected",
             tells="whether drivers, CUDA, NCCL and the wheels of this environment fit one another",
             command=[*CHECKS, "versions"]),
        *measuring_steps(output, is_fake=device == "cpu", num_gpus=num_gpus),
        *one_gpu_steps(jobs, has_pair=pair is not None),
        *sharded_steps(jobs),
        *long_steps(jobs, num_gpus=num_gpus),
        *failing_steps(jobs),
        *tests_of_kernels(),
        large_step(jobs, large),
        Step(name="leftovers", limit_s=60, title="memory that is still taken when all jobs have ended",
             tells="whether a rank lives on, or memory is lost with it", command=[*CHECKS, "leftovers"]),
    ]  # fmt: skip
    steps = [
        replace(step, title=f"{step.title} (here all on one GPU, sums by gloo)")
        if SHARED in step.command
        else step
        for step in steps
    ]
    if pair is None:
        return steps
    return [replace(step, needs=tuple(name for name in step.needs if name != "pair")) for step in steps]


def measuring_steps(output: Path, *, is_fake: bool, num_gpus: int) -> list[Step]:
    """What needs no checkpoint: weights are random, and made on the device."""

    # The widest sum that there are GPUs for.
    ranks = max((number for number in NUM_RANKS if number <= num_gpus), default=min(NUM_RANKS))

    mode = ["--fake"] if is_fake else []
    skips = "" if not is_fake else why_not() or ""

    def command(module: str, name: str) -> list[str]:
        return [PYTHON, "-m", f"tests.gpu.{module}", f"{output}/{name}", *mode]

    steps = [
        Step(name="shapes", runs_on_cpu=True,
             title="the project's kernels at the shapes of 1B, 8B and 70B over four ranks, in bfloat16",
             tells="whether a kernel is right at the sizes that people run, and how fast it is",
             command=command("first_kernels", "shapes")),
        Step(name="costs", runs_on_cpu=True, limit_s=300,
             title="products of a layer, launches, nodes of graphs, waits, sampling: seconds of each",
             tells="what the planner assumes of a GPU", command=command("first_costs", "costs")),
        Step(name="graphs", runs_on_cpu=True, title="thirty recorded passes of a model of 8B",
             tells="whether large passes can be recorded and replayed, what a graph needs, and what it saves",
             command=command("first_graphs", "graphs")),
        Step(name="drafters", limit_s=300,
             title="tiny drafters of the target's states: EAGLE-3, MTP, DFlash",
             tells="whether states are read and written rightly in recorded passes; seconds of a run",
             command=command("first_drafters", "drafters")),
        Step(name="all-reduce", num_gpus=2, limit_s=300,
             title="sums over 2, 4, ... GPUs by their size, in graphs",
             tells="whether the peers' memory and NCCL sum rightly in graphs, how fast, and whether it ends",
             command=[*launcher(ranks), "tests/gpu/first_sums.py", f"{output}/all-reduce"]),
        Step(name="calibration", needs=("costs",), num_gpus=0, limit_s=60, runs_on_cpu=True,
             title="what the steps before have measured, as calibration.json for jobs/plan.py --calibration",
             tells="whether it is complete, and nothing in it impossible",
             command=[PYTHON, "-m", "tests.gpu.first_calibration", str(output)]),
    ]  # fmt: skip
    return [replace(step, skips=skips) for step in steps]


def tests_of_kernels() -> list[Step]:
    """The project's own tests of what only a GPU can show, with small sizes and every form."""
    return [
        Step(name="passes",
             title="recorded passes and pinned buffers of one GPU, for every family of the tests",
             tells="whether a replay does what was recorded, in float32 and bfloat16",
             command=[*TESTS, "tests/models/test_cuda.py"]),
        # What is compiled ahead for other GPUs says nothing of this one, and takes minutes.
        Step(name="kernels", title="the tests of the project's kernels on one GPU",
             tells="whether every kernel answers rightly in every form and precision",
             command=[*TESTS, "tests/kernels", "--deselect", "tests/kernels/test_compilation.py"]),
    ]  # fmt: skip
