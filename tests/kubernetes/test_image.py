"""The image of the job, built: gigabytes are fetched, so that it is among what rarely runs."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.kubernetes.test_job import DOCKERFILE
from tests.ranks import REPOSITORY


@pytest.mark.timeout(1800)
def test_the_image_is_built() -> None:
    tool = shutil.which("docker") or shutil.which("buildah")
    if tool is None:
        pytest.skip("jobs/Dockerfile was read, but not built: neither docker nor buildah is here")
    command = [tool, "build", "--file", str(DOCKERFILE), str(REPOSITORY)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if any(word in ended.stderr for word in ("Docker daemon", "dial tcp", "lookup ", "resolution")):
        pytest.skip(f"jobs/Dockerfile was read, but not built: {ended.stderr.strip().splitlines()[-1]}")
    assert ended.returncode == 0, ended.stderr
