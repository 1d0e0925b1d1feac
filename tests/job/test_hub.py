"""The finished data set on a hub, of which a stand-in answers huggingface_hub's own client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest

from specdist.data.run.run_folder import RunFolder
from tests.job.hub import TOKEN, Hub, local_hub
from tests.job.launching import refused, run_here, shard_bytes
from tests.job.pair import Pair


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with local_hub() as running:
        # What HF_ENDPOINT sets, when the library is imported.
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running


@pytest.fixture
def options(pair: Pair, tmp_path: Path) -> dict[str, Any]:
    return {
        "prompts": pair.prompts, "target": pair.target, "device": "cpu", "max_new_tokens": 4, "limit": 6,
        "rows_per_shard": 2, "output": tmp_path / "run", "push_to_hub": "owner/rows",
    }  # fmt: skip


def test_a_finished_run_is_uploaded_once_and_can_be_loaded(
    hub: Hub, options: dict[str, Any], tmp_path: Path
) -> None:
    assert run_here(**options).code == 0
    files = hub.files["owner/rows"]
    assert {name: files[f"shards/{name}"] for name in shard_bytes(options["output"])} == shard_bytes(
        options["output"]
    )
    # Nothing that names this machine's paths; the card last.
    assert sorted(files) == ["README.md", *(f"shards/shard-0000{shard}.arrow" for shard in range(3))]
    assert hub.commits[-1] == ["README.md"] and str(tmp_path).encode() not in b"".join(files.values())
    for name, content in files.items():
        (tmp_path / "loaded" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "loaded" / name).write_bytes(content)
    assert len(datasets.load_dataset(str(tmp_path / "loaded"), split="train")) == 6
    num_commits = len(hub.commits)
    assert run_here(**options).code == 0 and len(hub.commits) == num_commits
    assert not [path.name for path in (options["output"] / "leases").iterdir() if path.name[:3] == "hub"]


def test_what_the_hub_refuses_is_told_first(
    hub: Hub, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    refused(run_here(**options), "--push_to_hub owner/rows is refused by the hub", "HF_TOKEN")
    assert not options["output"].exists()
    refused(run_here(**options | {"push_to_hub": "a/b/c"}), "is not the name of a repository")


def test_an_upload_that_fails_is_tried_again_by_the_same_command(hub: Hub, options: dict[str, Any]) -> None:
    hub.refuses_commits = True
    refused(run_here(**options), "all rows are kept, and the same command uploads them")
    assert RunFolder(options["output"]).missing_shards() == []
    hub.refuses_commits = False
    assert run_here(**options).code == 0
    assert len(hub.files["owner/rows"]) == 4
