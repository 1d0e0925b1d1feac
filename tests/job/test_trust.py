"""Code that comes with a model runs only with the user's consent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import dynamic_module_utils

from specdist.lab.plan.job import open_model
from specdist.utils.errors import UserError
from tests.job.launching import Ended, refused, run_here, shard_bytes
from tests.job.pair import Pair

# A family of its own, that is Llama; whoever imports it leaves a mark.
CODE = """
import os, pathlib
from transformers import LlamaConfig, LlamaForCausalLM

pathlib.Path({mark!r}).mkdir(exist_ok=True)
pathlib.Path({mark!r}, str(os.getpid())).touch()


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def modules_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies a model's code to where it can be imported: not to the user's folder."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def own(pair: Pair, tmp_path: Path, modules_cache: None) -> Path:
    """The target as a family that transformers does not know."""
    folder = tmp_path / "own"
    shutil.copytree(pair.target, folder)
    (folder / "own_code.py").write_text(CODE.format(mark=str(tmp_path / "imported")))
    auto_map = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    change_json(folder / "config.json", auto_map=auto_map, model_type="own_llama", architectures=["OwnModel"])
    return folder


def test_code_of_a_model_is_not_run_without_consent(
    options: dict[str, Any], own: Path, no_models: None, tmp_path: Path
) -> None:
    """Refused before anything of it is imported, as a target and as a draft."""
    for role in ("target", "draft"):
        ended = run_here(**(options | {role: own}), output=tmp_path / "run")
        refused(ended, f"--{role} {own}", "config.json", "auto_map", "--trust_remote_code")
    with pytest.raises(UserError, match="--target"):
        open_model("--target", str(own), "auto")
    assert not (tmp_path / "imported").exists()


def test_code_of_a_model_runs_with_consent(
    options: dict[str, Any], greedy: tuple[Path, Ended], own: Path, tmp_path: Path
) -> None:
    """The same weights give the same rows; a run without it is another run."""
    output = tmp_path / "run"
    ended = run_here(**(options | {"target": own}), trust_remote_code=True, output=output)
    assert ended.code == 0, ended.stderr
    assert (tmp_path / "imported").exists()
    assert shard_bytes(output) == shard_bytes(greedy[0])
    fingerprint = json.loads((output / "manifest.json").read_text())["fingerprint"]
    assert fingerprint["trust_remote_code"] is True
    # The code decides the rows as the weights do.
    with (own / "own_code.py").open("a") as file:
        file.write("# changed\n")
    ended = run_here(**(options | {"target": own}), trust_remote_code=True, output=output)
    assert "\n  target: " in ended.stderr and ended.code == 2
