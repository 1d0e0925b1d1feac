"""slurm/run.sh with stand-ins for Slurm's commands: what it asks of a controller that is busy."""

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
        until (( 0x$(awk '/SigCgt/ {{print $2}}' /proc/$PPID/status) & {TERM_BIT} )); do sleep 1; done
        kill -$SIGNAL $PPID
        while :; do sleep 1; done""",
    # Tries again after a time, as where Slurm is ending the job.
    "scancel": """echo "scancel $*" >> $FOLDER/told
        kill $(cat $FOLDER/pid)
        /bin/sleep 1
        echo again >> $FOLDER/told""",
    "squeue": f'{BUSY}; [[ $* != *"--jobs=$NAME "* ]] || echo $STATE',
    "scontrol": f'echo "$*" >> "$FOLDER/told"; {BUSY}',
    "sleep": "exec /bin/sleep 0.02",
}
STOP, REQUEUE = "scancel --quiet --signal=TERM {}", "requeue {}"


NO_ARRAY, OWN_ID, OTHER_ID = (("7",), "7"), (("7", "7", "3"), "7_3"), (("9", "7", "3"), "9")


@pytest.mark.parametrize(
    ("ids", "name", "signal", "state", "told"),
    [
        (*NO_ARRAY, "", "RUNNING", [REQUEUE, REQUEUE]),
        (*OWN_ID, "", "COMPLETING", []),
        (*OWN_ID, "USR1", "RUNNING", [STOP, REQUEUE, REQUEUE]),
        (*OTHER_ID, "USR1", "RUNNING", [STOP, REQUEUE, REQUEUE]),
        (*OWN_ID, "TERM", "RUNNING", [STOP]),
    ],
    ids=["failure", "cancelled", "time-limit", "time-limit of another id", "preempted"],
)
def test_a_job_names_itself_alone(
    ids: tuple[str, ...], name: str, signal: str, state: str, told: list[str], tmp_path: Path
) -> None:
    """By the array's own id, which its last task has, Slurm would stop and requeue all tasks. A job that a
    task has submitted inherits that task's variables, which are not its name. Nor does a request to stop
    outlive the replicas: it would reach the next start."""
    for command, lines in COMMANDS.items():
        path = tmp_path / command
        path.write_text(f"#!/usr/bin/env bash\n{lines}\n")
        path.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "FOLDER": str(tmp_path), "NAME": name,
        "SIGNAL": signal, "STATE": state, "SLURM_JOB_NUM_NODES": "1", "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "SPECDIST_PYTHON": "bash",
        **dict(zip(("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"), ids, strict=False)),
    }  # fmt: skip
    ended = subprocess.run(
        ["bash", "slurm/run.sh", "config.yaml"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == (75 if signal else 1), ended.stderr
    path = tmp_path / "told"
    assert (path.read_text().splitlines() if path.exists() else []) == [each.format(name) for each in told]
    assert ("requeuing the job" in ended.stderr) == (told == [REQUEUE, REQUEUE])
