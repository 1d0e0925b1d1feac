"""slurm/run.sh with stand-ins for Slurm's commands: what it does when the controller does not answer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.ranks import REPOSITORY

COMMANDS = {
    "srun": "exit 1",
    # Fails once, as with a controller that does not answer in time.
    "squeue": '[[ -e $FOLDER/asked ]] || {{ touch "$FOLDER/asked"; exit 1; }}; echo {state}',
    "scontrol": 'echo "$@" >> "$FOLDER/told"; [[ $(wc -l < "$FOLDER/told") -gt 1 ]]',
}


@pytest.mark.parametrize(("state", "num_told"), [("RUNNING", 2), ("COMPLETING", 0)])
def test_a_job_that_failed_is_requeued_by_a_busy_controller(
    state: str, num_told: int, tmp_path: Path
) -> None:
    for name, line in COMMANDS.items():
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\n{line.format(state=state) if name == 'squeue' else line}\n")
        path.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "FOLDER": str(tmp_path),
        "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "SPECDIST_PYTHON": "bash",
    }  # fmt: skip
    ended = subprocess.run(
        ["bash", "slurm/run.sh", "config.yaml"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1, ended.stderr
    told = tmp_path / "told"
    assert (told.read_text().splitlines() if told.exists() else []) == ["requeue 7"] * num_told
    assert ("requeuing the job" in ended.stderr) == (num_told > 0)
