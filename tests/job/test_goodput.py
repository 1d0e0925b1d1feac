"""The main job with a policy that depends on measured costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specdist.cli import generate
from specdist.job.models.model_plan import plan_models
from specdist.job.ranks.topology import Topology
from specdist.job.run.manifest import reproducibility_info
from tests.job.given_costs import generate_with_long_passes
from tests.job.launching import Ended, Main, parse, read_output, run_here
from tests.job.ranks import fork_ranks


def manifest_info(output: Path) -> dict[str, Any]:
    info: dict[str, Any] = json.loads((output / "manifest.json").read_text())["info"]
    return info


def test_costs_are_measured_once_and_frozen(
    options: dict[str, Any], greedy: tuple[Path, Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    assert run_here(**options, policy="goodput", output=output).code == 0
    assert read_output(output)["completion_ids"] == read_output(greedy[0])["completion_ids"]
    info = manifest_info(output)
    assert info["reproducibility"] == "tokens"
    costs = info["costs"]
    # No batch is larger than the rows can fill.
    num_rows = len(read_output(output))
    assert costs["context"]["num_rows"] == num_rows == max(costs["draft"]["sizes"])
    # As if it had been stopped before it finished its last shard.
    for path in output.glob("*/shard-00002.*"):
        path.unlink()
    monkeypatch.setattr(
        "specdist.job.replica.replica.measure_costs", lambda *_, **__: pytest.fail("measured again")
    )
    assert run_here(**options, policy="goodput", output=output).code == 0
    assert manifest_info(output)["costs"] == costs
    assert read_output(output)["completion_ids"] == read_output(greedy[0])["completion_ids"]


@pytest.mark.parametrize(
    ("settings", "expected", "is_up_to_rounding"),
    [
        ({"temperature": 1.0}, "distribution", False),
        ({"dtype": "bfloat16"}, "tokens", True),
        # What is rounded to 8 bits moves with the last digits, which are those of a pass of so many tokens.
        ({"target_quantization": "int8"}, "distribution", True),
        ({"draft_quantization": "float8"}, "tokens", False),
        ({"draft_quantization": "int4", "policy": "fixed", "temperature": 1.0}, "tokens", False),
        ({"draft_quantization": "float8", "policy": "fixed", "temperature": 1.0}, "distribution", False),
        ({"cache_dtype": "float8"}, "distribution", True),
    ],
)
def test_a_run_states_its_reproducibility(
    options: dict[str, Any], settings: dict[str, Any], expected: str, is_up_to_rounding: bool
) -> None:
    config = parse(**options | {"policy": "goodput"} | settings, output="unused")
    topology = Topology(rank=0, world_size=1, tp_size=1, uses_draft=True, device=torch.device("cpu"))
    info = reproducibility_info(config, topology, plan_models(config))
    assert (info["reproducibility"], info["up_to_rounding"]) == (expected, is_up_to_rounding)


@pytest.mark.ranks
@pytest.mark.parametrize("main", [generate_with_long_passes, generate], ids=["cheap draft", "measured"])
def test_ranks_whose_rounds_are_chosen(
    options: dict[str, Any], greedy: tuple[Path, Ended], tmp_path: Path, main: Main
) -> None:
    """The defaults. The models are so small that by measured times nothing may pay."""
    own = {"policy": None, "overlap": None, "limit": 10, "output": tmp_path / "run"}
    assert fork_ranks(2, main, **(options | own)).code == 0
    found = read_output(tmp_path / "run")
    assert found["completion_ids"] == read_output(greedy[0]).slice(0, 10)["completion_ids"]
    info = manifest_info(tmp_path / "run")
    assert info["reproducibility"] == "tokens"
    if main is generate:
        assert min(info["costs"]["message"]["ns"]) > 0 and info["costs"]["context"]["num_rows"] == len(found)
    else:
        assert sum(found["num_accepted_draft_tokens"].to_pylist()) > 0
