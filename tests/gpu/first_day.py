"""The first commands on a real GPU node; those whose failure tells most come first.

    python -m tests.gpu.first_day                    run them all, into runs/first-day
    python -m tests.gpu.first_day --list             only show them
    python -m tests.gpu.first_day --only kernels main --output /scratch/first-day
    python -m tests.gpu.first_day --fake             the steps that a CPU can do, to try this program itself;
                                                     measurements are of a fake device, and mean nothing

What the tests cannot show on a CPU and on their fake device, and these commands are for:

- Races between streams: there all work is done at once, when it is called. A missing wait goes unnoticed.
- NCCL's own blocking: ranks of the tests are joined by gloo. NCCL's calls return before the others have come,
  hang where gloo raises an error, and inside a graph are kernels that keep a device busy.
- Memory: there only tensors are counted; what a graph's kernels take is made up. What they and NCCL's
  connections need, what fragments, and what is left when a rank has started over, is only known here.
- Kernels' accuracy, and which kernel is chosen: there are plain operations in their place.
- Time: of kernels, copies, sums over NVLink or PCIe, of the host that launches, of loading from storage.
- Several nodes' worth of devices, drivers and libraries: that they are there, and fit one another.

Results are kept in ``results.json``, by name, and what was measured in ``calibration.json``, for the planner.
The same command goes on where it ended: steps that have passed are run again only by ``--only``. A step that
reads what another leaves brings that one along, unless it has passed and its folder is there.

The last line on stdout is a JSON document; the exit code is 0 only if every step passed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tests.gpu.first_steps import Step, plan

REPOSITORY = Path(__file__).parents[2]
PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"
NO_GPU = 3
NOT_ON_ONE_GPU = (
    "Not shown, since it takes several GPUs: NCCL and its part in recorded passes, peers' memory, and their\n"
    "times. Steps that passed say nothing of these."
)


@dataclass(frozen=True)
class Result:
    """The outcome of a step; ``reason``: why it was skipped, or how it failed."""

    name: str
    outcome: str
    seconds: float
    reason: str
    log: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.first_day", description="Try a new GPU node, the most telling steps first."
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/first-day"), help="folder of logs and results"
    )
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps alone")
    parser.add_argument("--list", action="store_true", help="show the plan, run nothing")
    parser.add_argument("--fake", action="store_true", help="on a CPU, the steps that need no GPU")
    options = parser.parse_args(arguments)
    # The commands run in the repository, wherever this was started.
    output, num_gpus = options.output.absolute(), count_gpus()
    every = plan(output, device="cpu" if options.fake else "cuda", num_gpus=num_gpus)
    unknown = sorted(set(options.only or ()) - {step.name for step in every})
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: the steps are {' '.join(step.name for step in every)}")
    kept = kept_results(output)
    passed = {name for name, result in kept.items() if result.outcome == PASSED}
    steps = with_needs(set(options.only or {step.name for step in every} - passed), every, kept, output)
    show(steps)
    if options.list:
        say(json.dumps({"steps": [step.name for step in steps], "num_gpus": num_gpus}))
        return 0
    if not num_gpus and not options.fake:
        say("\nThis machine has no GPU: nothing was run. --fake tries the steps that a CPU can do.")
        say(json.dumps({"error": "no GPU", "num_gpus": 0}))
        return NO_GPU
    (output / "logs").mkdir(parents=True, exist_ok=True)
    for step in steps:
        kept[step.name] = run(step, output, num_gpus, is_fake=options.fake)
        # Saved after every step, whatever the next one does to the node.
        keep(kept, every, num_gpus, output)
    results = [kept[step.name] for step in every if step.name in kept]
    say("\n" + table(results))
    if num_gpus < 2:
        say(f"\n{NOT_ON_ONE_GPU}")
    failed = [result.name for result in results if result.outcome == FAILED]
    counts = {
        outcome.lower(): sum(result.outcome == outcome for result in results)
        for outcome in (PASSED, FAILED, SKIPPED)
    }
    say(json.dumps({"output": str(output), "num_gpus": num_gpus, **counts, "failures": failed}))
    return 1 if failed else 0


def show(steps: Sequence[Step]) -> None:
    """What only a GPU can show, and the steps with their commands."""
    shows = str(__doc__).partition("What the ")[2].partition("Results are kept")[0]
    say(f"What the {shows.strip()}\n")
    for number, step in enumerate(steps, 1):
        gpus = "1 GPU" if step.num_gpus == 1 else f"{step.num_gpus} GPUs"
        say(f"{number:2}. {step.name}: {step.title}\n    tells: {step.tells}")
        say(f"    {gpus}, at most {step.limit_s} s\n    {shlex.join(step.command)}")


def kept_results(output: Path) -> dict[str, Result]:
    """Of earlier calls, by step."""
    path = output / "results.json"
    found = json.loads(path.read_text())["results"] if path.is_file() else []
    return {values["name"]: Result(**values) for values in found}


def keep(kept: dict[str, Result], every: list[Step], num_gpus: int, output: Path) -> None:
    results = [asdict(kept[step.name]) for step in every if step.name in kept]
    (output / "results.json").write_text(json.dumps({"num_gpus": num_gpus, "results": results}, indent=2))


def with_needs(chosen: set[str], every: list[Step], kept: dict[str, Result], output: Path) -> list[Step]:
    """The chosen steps and those whose folders they read and that are not there, in the order of the plan."""
    wanted = set(chosen)
    # A step reads what earlier ones leave.
    for step in reversed(every):
        if step.name in wanted:
            wanted |= {name for name in step.needs if not has_passed(name, kept, output)}
    return [step for step in every if step.name in wanted]


def has_passed(name: str, kept: dict[str, Result], output: Path) -> bool:
    return name in kept and kept[name].outcome == PASSED and (output / name).is_dir()


def count_gpus() -> int:
    """Counted in another process, so that this one does not use a device."""
    script = "import torch; print(torch.cuda.device_count())"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return int(ended.stdout)


def run(step: Step, output: Path, num_gpus: int, *, is_fake: bool) -> Result:
    """Run a step to its end or its limit; it never raises an error, so that the next step follows."""
    log = output / "logs" / f"{step.name}.log"
    reason = step.skips
    if is_fake and not step.runs_on_cpu:
        reason = "a CPU cannot do it"
    elif not is_fake and step.num_gpus > num_gpus:
        reason = f"it needs {step.num_gpus} GPUs, and this node has {num_gpus}"
    if reason:
        say(f"{step.name}: skipped, {reason}")
        return Result(step.name, SKIPPED, 0.0, reason, "")
    say(f"{step.name} ...")
    begin = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    if is_fake:
        environment |= {"DS_ACCELERATOR": "cpu"}
    with log.open("w") as file:
        file.write(f"{shlex.join(step.command)}\n\n")
        file.flush()
        process = subprocess.Popen(
            step.command,
            cwd=REPOSITORY,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(step.limit_s)
            reason = "" if code == 0 else f"exit code {code}: {last_words(log)}"
        except subprocess.TimeoutExpired:
            reason = f"not over after {step.limit_s:.0f} s: {last_words(log)}"
        finally:
            kill_family(process)
    seconds = time.monotonic() - begin
    say(f"{step.name}: {f'{FAILED}, {reason}' if reason else PASSED} ({seconds:.0f} s)")
    return Result(step.name, FAILED if reason else PASSED, round(seconds, 1), reason, str(log))


def kill_family(process: subprocess.Popen[bytes]) -> None:
    """If it is still there: launchers start ranks in sessions of their own."""
    if process.poll() is None:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()


def last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][-200:]


def table(results: list[Result]) -> str:
    rows = [f"{'step':12} {'outcome':8} {'seconds':>8}  why, or where to read more"]
    rows += [
        f"{result.name:12} {result.outcome:8} {result.seconds:8.1f}  {result.reason or result.log}"
        for result in results
    ]
    return "\n".join(rows)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
