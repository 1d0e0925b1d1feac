"""slurm/run.sh with stand-ins for Slurm's commands: what it asks of them, also of a busy controller."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.ranks import REPOSITORY

# The last signal that run.sh traps, in a mask of signals.
TERM_BIT = 0x4000
# Fails once, as with a controller that does not answer in time.
BUSY = '[[ -e $0.asked ]] || { touch "$0.asked"; exit 1; }'
COMMANDS = {
    # Fails; or sends run.sh a signal, and runs until it is asked to stop.
    "srun": f"""[[ -n $SIGNAL ]] || exit 1
        trap 'exit 75' TERM
        echo $$ > "$FOLDER/pid"
        until (( 0x$(awk '/SigCgt/ {{print $2}}' /proc/$PPID/status) & {TERM_BIT} )); do sleep 0.02; done
        kill -$SIGNAL $PPID
        while :; do sleep 0.05; done""",
    # Tries again after a time, as where Slurm is ending the job.
    "scancel": """echo "scancel $*" >> "$FOLDER/told"
        kill "$(cat "$FOLDER/pid")"
        sleep 1
        echo again >> $FOLDER/told""",
    "squeue": f'{BUSY}; echo "$*" > "$FOLDER/asked"; echo $STATE',
    "scontrol": f'echo "$*" >> "$FOLDER/told"; {BUSY}',
}


def told_by_run_sh(folder: Path, code: int, **environment: str) -> tuple[list[str], str]:
    """What it tells Slurm, and its messages."""
    for name, lines in COMMANDS.items():
        path = folder / name
        path.write_text(f"#!/usr/bin/env bash\n{lines}\n")
        path.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment = inherited | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "FOLDER": str(folder), "SIGNAL": "",
        "STATE": "RUNNING", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SPECDIST_PYTHON": "bash",
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
    } | environment  # fmt: skip
    ended = subprocess.run(
        ["bash", "slurm/run.sh", "config.yaml"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == code, ended.stderr
    told = folder / "told"
    return told.read_text().splitlines() if told.exists() else [], ended.stderr


@pytest.mark.parametrize(("state", "num_told"), [("RUNNING", 2), ("COMPLETING", 0)])
def test_a_job_that_failed_is_requeued_by_a_busy_controller(
    state: str, num_told: int, tmp_path: Path
) -> None:
    told, messages = told_by_run_sh(tmp_path, 1, STATE=state)
    assert told == ["requeue 7"] * num_told
    assert ("requeuing the job" in messages) == (num_told > 0)


@pytest.mark.parametrize("signal", ["", "USR1", "TERM"])
@pytest.mark.parametrize(
    ("job", "array", "name"), [("7", "", "7"), ("7", "7", "7_3"), ("9", "7", "9")],
    ids=["no-array", "array's-own-id", "other-id"],
)  # fmt: skip
def test_a_task_of_an_array_names_itself_alone(
    job: str, array: str, name: str, signal: str, tmp_path: Path
) -> None:
    """A failure, a time limit, and a preemption or scancel: by the array's own id, which its last task has,
    Slurm would stop and requeue all tasks. A job that a task has submitted inherits that task's variables,
    which are not its name. Nor does a request to stop outlive the replicas: it would reach the next start."""
    for command in ("squeue", "scontrol"):
        (tmp_path / f"{command}.asked").touch()
    of_array = {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": "3"} if array else {}
    told, _ = told_by_run_sh(tmp_path, 75 if signal else 1, SIGNAL=signal, SLURM_JOB_ID=job, **of_array)
    stops, requeues = [f"scancel --quiet --signal=TERM {name}"], [f"requeue {name}"]
    assert told == {"": requeues, "USR1": stops + requeues, "TERM": stops}[signal]
    if not signal:
        assert f"--jobs={name} " in (tmp_path / "asked").read_text()
