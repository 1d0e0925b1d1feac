"""What passes take is kept for the next start on such a machine, and no file of it can do harm."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specdist.data.run.run_folder import RunFolder
from specdist.job.costs.kept_costs import FOLDER_VARIABLE, OFF, KeptCosts, costs_key
from specdist.job.models.model_plan import ModelPlan, plan_models
from specdist.job.ranks.topology import Topology
from specdist.job.run.workload import Workload
from specdist.job.totals.report import frozen_costs
from specdist.policies.costs import ContextCosts, CostModel, Curve
from tests.job.launching import parse, read_output, run_here

COSTS = CostModel(Curve([1, 8], [20, 30]), Curve([1], [2]), ContextCosts(7, 8, 0.5))
WORK = Workload(num_rows=100, num_context_tokens=70)


def key(options: dict[str, Any], work: Workload = WORK, num_slots: int = 8, **changes: Any) -> dict[str, Any]:
    """``changes``: of options, and ``models`` and ``topology``."""
    options = options | {"output": "run"}
    models: ModelPlan = changes.pop("models", None) or plan_models(parse(**options))
    topology = Topology(rank=0, world_size=1, tp_size=1, uses_draft=True, device=torch.device("cpu"))
    topology = changes.pop("topology", None) or topology
    return costs_key(parse(**options | changes), models, topology, work, num_slots=num_slots)


def test_what_decides_times_decides_which_file_it_is(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    same = key(options)
    models = plan_models(parse(**options, output="run"))
    others = [
        key(options, num_slots=4),
        key(options, dataclasses.replace(WORK, num_rows=5)),
        key(options, dataclasses.replace(WORK, num_context_tokens=700)),
        key(options, dataclasses.replace(WORK, text_ids=(1, 2))),
        key(options, temperature=1.0),
        key(options, model_impl="transformers"),
        key(options, policy="goodput"),
        key(options, models=dataclasses.replace(models, draft=None)),
        key(options, models=dataclasses.replace(models, vocab_size=7)),
        key(
            options,
            topology=Topology(rank=0, world_size=2, tp_size=1, uses_draft=True, device=torch.device("cpu")),
        ),
    ]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    others.append(key(options))
    monkeypatch.undo()
    for other in others:
        assert other != same
    assert key(options, dataclasses.replace(WORK, text_ids=(2, 1))) not in others
    assert key(options) == same
    assert key(options, dataclasses.replace(WORK, num_rows=101, num_context_tokens=75)) == same
    assert key(options, seed=7, output="elsewhere", prompts="others", stop=["x"]) == same


def test_no_file_can_do_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptCosts({"a": (1, 2)}, tmp_path / "costs")
    assert kept.read() is None
    kept.write(COSTS)
    [path] = (tmp_path / "costs").iterdir()
    whole = path.read_bytes()
    assert KeptCosts({"a": [1, 2]}, path.parent).read() == COSTS
    assert KeptCosts({"a": 1}, path.parent).read() is None
    damaged = [b"", b"\xff", b"[]", b"{}", whole[:-20], whole.replace(b"30", b"31")]
    # The digest of another file's name.
    damaged.append(json.dumps({**json.loads(whole), "key": {}}).encode())
    for content in damaged:
        path.write_bytes(content)
        assert kept.read() is None, content
    path.unlink()
    path.mkdir()
    assert kept.read() is None
    kept.write(COSTS)
    path.rmdir()
    path.parent.rmdir()
    path.parent.write_text("not a folder")
    kept.write(COSTS)
    assert kept.read() is None
    monkeypatch.setenv(FOLDER_VARIABLE, OFF)
    KeptCosts({}).write(COSTS)
    assert KeptCosts({}).read() is None
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "other"))
    KeptCosts({}).write(COSTS)
    assert KeptCosts({}).read() == COSTS and (tmp_path / "other").is_dir()
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    KeptCosts({}).write(COSTS)
    assert len(list((tmp_path / "caches" / "specdist" / "costs").iterdir())) == 1


def test_doubtful_costs_are_not_kept(tmp_path: Path) -> None:
    KeptCosts({}, tmp_path).write(dataclasses.replace(COSTS, doubt="the machine was busy"))
    assert not list(tmp_path.iterdir())
    KeptCosts({}, tmp_path).write(COSTS)
    assert list(tmp_path.iterdir())


def test_the_next_run_of_a_pair_measures_nothing(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdist.job.costs.measuring.doubts", lambda *_, **__: "")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "costs"))
    run = options | {"policy": "goodput"}
    assert run_here(**run, output=tmp_path / "first").code == 0
    monkeypatch.setattr(
        "specdist.job.replica.replica.measure_costs", lambda *_, **__: pytest.fail("measured again")
    )
    assert run_here(**run, output=tmp_path / "second").code == 0
    first, second = tmp_path / "first", tmp_path / "second"
    assert frozen_costs(RunFolder(first)) == frozen_costs(RunFolder(second)) is not None
    assert read_output(first)["completion_ids"] == read_output(second)["completion_ids"]
