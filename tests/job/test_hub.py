"""The finished data set on a hub, by a stand-in for huggingface_hub's client with its signatures."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import datasets
import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import LocalTokenNotFoundError

from specdist.job.totals import hub
from tests.job.launching import refused, run_here, shard_bytes
from tests.job.pair import Pair


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``files``: of the repository, by path; ``commits``: the paths of each."""
    api = create_autospec(HfApi, instance=True)
    api.endpoint, api.files, api.commits = "https://hub", {}, []

    def commit(repository: str, operations: list[CommitOperationAdd], **_: Any) -> None:
        assert repository == "owner/rows"
        api.commits.append([operation.path_in_repo for operation in operations])
        for operation in operations:
            with operation.as_file() as file:
                api.files[operation.path_in_repo] = file.read()

    api.create_commit.side_effect = commit
    monkeypatch.setattr(hub, "_api", lambda: api)
    return api


@pytest.fixture
def options(pair: Pair, tmp_path: Path) -> dict[str, Any]:
    return {
        "prompts": pair.prompts, "target": pair.target, "device": "cpu", "max_new_tokens": 4, "limit": 6,
        "rows_per_shard": 2, "output": tmp_path / "run", "push_to_hub": "owner/rows",
    }  # fmt: skip


def test_a_finished_run_is_uploaded_once_and_can_be_loaded(
    api: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    assert run_here(**options).code == 0
    api.create_repo.assert_called_once_with("owner/rows", repo_type="dataset", private=True, exist_ok=True)
    shards = {f"shards/{name}": content for name, content in shard_bytes(options["output"]).items()}
    assert len(shards) == 3 and {name: api.files[name] for name in shards} == shards
    # Nothing that names this machine's paths; the card last.
    assert sorted(api.files) == sorted([*shards, "README.md"])
    assert api.commits[-1] == ["README.md"] and str(tmp_path).encode() not in b"".join(api.files.values())
    for name, content in api.files.items():
        (tmp_path / "loaded" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "loaded" / name).write_bytes(content)
    assert len(datasets.load_dataset(str(tmp_path / "loaded"), split="train")) == 6
    num_commits = len(api.commits)
    assert run_here(**options).code == 0 and len(api.commits) == num_commits
    assert not [path.name for path in (options["output"] / "leases").iterdir() if path.name[:3] == "hub"]


def test_what_the_hub_refuses_is_told_first(api: Any, options: dict[str, Any]) -> None:
    api.auth_check.side_effect = LocalTokenNotFoundError("no token")
    refused(run_here(**options), "--push_to_hub owner/rows is refused by the hub", "HF_TOKEN")
    assert not options["output"].exists()
