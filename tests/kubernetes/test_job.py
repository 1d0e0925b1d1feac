"""The Job of jobs/kubernetes: as the published schema has it, and its command as a pod runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from specdist.job.ranks.signals import EXIT_STOPPED
from tests.job.killing import wait_until
from tests.job.launching import ACCELERATE_CONFIG, TIMEOUT_S, kill_tree
from tests.job.pair import Pair
from tests.ranks import REPOSITORY

MANIFEST = REPOSITORY / "jobs/kubernetes/job.yaml"
SCHEMA = json.loads(Path(__file__).with_name("job-batch-v1.json").read_text())


@pytest.fixture
def job() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())
    return found


def container_of(job: dict[str, Any]) -> dict[str, Any]:
    (found,) = job["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_the_job_is_as_published(job: dict[str, Any]) -> None:
    jsonschema.validate(job, SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job | {"spec": job["spec"] | {"completionmode": "Indexed"}}, SCHEMA)


def action(job: dict[str, Any], code: int) -> str:
    """What Kubernetes does about a pod that ended with this exit code: the first rule that fits."""
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes and codes["containerName"] == container_of(job)["name"] and code in codes["values"]:
            assert codes["operator"] == "In"
            return str(rule["action"])
    return "Count"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (2, "FailJob"),
        (28, "FailIndex"),
        (EXIT_STOPPED, "Ignore"),
        (143, "Ignore"),
        (1, "Count"),
        (137, "Count"),
    ],
)
def test_each_exit_code_has_its_consequence(job: dict[str, Any], code: int, expected: str) -> None:
    assert action(job, code) == expected


def test_pods_have_a_gpu_for_each_rank_and_mounts_for_what_they_use(job: dict[str, Any]) -> None:
    container = container_of(job)
    words = container["command"]
    num_ranks = int(words[words.index("--num_processes") + 1])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == num_ranks
    volumes = {volume["name"] for volume in job["spec"]["template"]["spec"]["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == volumes
    for path in (words[words.index("--config") + 1], container["args"][1]):
        assert any(path.startswith(f"{mount}/") for mount in mounts)
    assert job["spec"]["completions"] == job["spec"]["parallelism"]


def pod(job: dict[str, Any], pair: Pair, folder: Path) -> list[str]:
    """The command of a pod, with this machine's paths, one rank and small models."""
    options = pair.job(
        temperature=0, max_new_tokens=100, rows_per_shard=6, max_num_seqs=1, policy="fixed",
        overlap="synchronous",
    )  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump({name: str(value) for name, value in options.items()}))
    places = {
        ".venv/bin/python": sys.executable,
        "jobs/accelerate/gpu8.yaml": str(ACCELERATE_CONFIG),
        "/config/run.yaml": str(folder / "run.yaml"),
        "/data/runs/mine": str(folder / "runs/mine"),
    }
    container = container_of(job)
    words = [places.pop(word, word) for word in container["command"] + container["args"]]
    assert not places
    words[words.index("--num_processes") + 1] = "1"
    return words


def test_a_pod_that_is_evicted_is_not_counted(job: dict[str, Any], pair: Pair, tmp_path: Path) -> None:
    output = tmp_path / "runs/mine"
    first = subprocess.Popen(
        pod(job, pair, tmp_path), cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: any(path.stat().st_size for path in output.glob("parts/*.jsonl")))
        first.send_signal(signal.SIGTERM)
        _, stderr = first.communicate(timeout=TIMEOUT_S)
    finally:
        kill_tree(first)
    assert action(job, first.returncode) == "Ignore", stderr
    assert "to resume, start the same command" in stderr


DOCKERFILE = REPOSITORY / "jobs/Dockerfile"


def test_the_image_has_what_the_job_runs(job: dict[str, Any]) -> None:
    """As a linter reads it: a named version, no caches, files that exist. Fault: a folder that has moved."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    steps = [line.split() for line in text.splitlines() if line and line[0] != "#"]
    assert steps[0] == ["FROM", "python:3.12-slim-bookworm"]
    assert ["WORKDIR", container_of(job)["workingDir"]] in steps
    copied = [name for step in steps if step[0] == "COPY" for name in step[1:-1]]
    assert all((REPOSITORY / name).exists() for name in copied)
    words = container_of(job)["command"]
    assert all(word.split("/")[0] in copied for word in words if word.startswith("jobs/"))
    assert f"venv {words[0].split('/')[0]} " in text
    assert "--no-cache-dir" in text and "rm -rf /var/lib/apt/lists/*" in text
