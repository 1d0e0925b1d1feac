"""The Job of jobs/kubernetes: as the published schema has it, and its command as a pod runs it."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from specdist.job.ranks.signals import EXIT_STOPPED
from tests.job.killing import wait_until
from tests.job.launching import ACCELERATE_CONFIG, TIMEOUT_S, kill_tree
from tests.job.pair import build_pair
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


def test_a_field_that_does_not_exist_is_noticed(job: dict[str, Any]) -> None:
    for change in ({"completionmode": "Indexed"}, {"parallelism": "two"}, {"podFailurePolicy": {}}):
        wrong = copy.deepcopy(job)
        wrong["spec"] |= change
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, SCHEMA)


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


@pytest.fixture
def pod(job: dict[str, Any], tmp_path: Path) -> Iterator[list[str]]:
    """The command of a pod, with this machine's paths, one rank and small models."""
    pair = build_pair(tmp_path / "pair")
    options = {
        "prompts": pair.prompts, "target": pair.target, "draft": pair.draft, "device": "cpu",
        "temperature": 0, "max_new_tokens": 200, "rows_per_shard": 6, "max_num_seqs": 1,
        "policy": "fixed", "overlap": "synchronous",
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({name: str(value) for name, value in options.items()}))
    places = {
        ".venv/bin/python": sys.executable,
        "jobs/accelerate/gpu8.yaml": str(ACCELERATE_CONFIG),
        "/config/run.yaml": str(tmp_path / "run.yaml"),
        "/data/runs/mine": str(tmp_path / "runs/mine"),
    }
    container = container_of(job)
    words = [places.pop(word, word) for word in container["command"] + container["args"]]
    assert not places
    words[words.index("--num_processes") + 1] = "1"
    yield words


def test_a_pod_that_is_evicted_is_continued_by_the_next(
    pod: list[str], job: dict[str, Any], tmp_path: Path
) -> None:
    output = tmp_path / "runs/mine"
    first = subprocess.Popen(
        pod, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: any(output.glob("parts/*.jsonl")) and bool(first_rows(output)))
        first.send_signal(signal.SIGTERM)
        _, stderr = first.communicate(timeout=TIMEOUT_S)
    finally:
        kill_tree(first)
    assert action(job, first.returncode) == "Ignore", stderr
    second = subprocess.run(pod, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert second.returncode == 0, second.stderr
    assert json.loads(second.stdout.splitlines()[-1])["complete"] is True


def first_rows(output: Path) -> bytes:
    return b"".join(path.read_bytes() for path in output.glob("parts/*.jsonl"))


def test_a_wrong_option_fails_the_whole_job(pod: list[str], job: dict[str, Any]) -> None:
    ended = subprocess.run(
        [*pod, "--top_p", "2"], cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert action(job, ended.returncode) == "FailJob", ended.stderr
    assert "--top_p" in ended.stderr
