"""Commands of the first day on a GPU node, some of them on a CPU and on a fake device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specdist.lab.plan.calibration import Calibration
from tests.gpu import check_first_day, first_calibration
from tests.gpu.first_checks import completions_of, gaps_of
from tests.gpu.processes import needs_fake_device, on_device
from tests.ranks import REPOSITORY

TIMEOUT_S = 250


def test_the_steps_that_a_cpu_can_do_pass_and_their_results_are_saved(tmp_path: Path) -> None:
    output, names = tmp_path / "day", ["pair", "cpu", "cpu-sampled", "sampled", "main"]
    names += ["long-pair", "long-alone"]
    command = [sys.executable, "-m", "tests.gpu.first_day", "--fake", "--output", str(output)]
    ended = subprocess.run(
        [*command, "--only", *names], cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == {
        "output": str(output), "num_gpus": 0, "passed": 6, "failed": 0, "skipped": 1, "failures": [],
    }  # fmt: skip
    kept = json.loads((output / "results.json").read_text())["results"]
    assert {result["name"] for result in kept if result["outcome"] == "skipped"} == {"main"}
    rows = zip(gaps_of(output / "cpu"), completions_of(output / "cpu"), strict=True)
    assert all(len(gaps) == len(row) > 0 for gaps, row in rows)
    assert "NCCL and its part in recorded passes, peers' memory" in ended.stdout
    assert "16 of 16 completions" in (output / "logs/long-alone.log").read_text()
    assert "100% of the tokens" in (output / "logs/sampled.log").read_text()
    # A run that differs is a failure.
    (output / "long-alone/shards/shard-00000.arrow").unlink()
    runs = [str(output / name) for name in ("long-pair/known", "long-alone")]
    comparison = [sys.executable, "-m", "tests.gpu.first_checks", "equal", *runs]
    assert subprocess.run([*comparison, "--", "true"], cwd=REPOSITORY, capture_output=True).returncode


@needs_fake_device
def test_a_wrong_kernel_makes_its_step_fail(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")
    on_device(check_first_day.check_wrong_kernels_are_seen, str(tmp_path))


@needs_fake_device
def test_figures_of_a_fake_device_are_no_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")
    on_device(check_first_day.check_measuring_steps, str(tmp_path))
    assert first_calibration.calibrate(tmp_path) == 0
    assert "was fake" in capsys.readouterr().out and not (tmp_path / "calibration.json").exists()
    # As a GPU would have written them.
    files = [tmp_path / "costs/costs.json", tmp_path / "graphs/graphs.json"]
    costs, graphs = (json.loads(path.read_text()) | {"is_fake": False} for path in files)
    # Differences of two times, which a busy machine makes negative.
    costs["costs"] |= dict.fromkeys(("launch_s", "graph_s", "graph_node_s", "wait_s"), 1e-5)
    sums = [
        {"num_ranks": 2, "num_bytes": size, "way": "NCCL", "seconds": 1e-5, "nccl_s": 1e-5} for size in (1, 2)
    ]
    (tmp_path / "all-reduce").mkdir()
    (tmp_path / "all-reduce/sums.json").write_text(json.dumps({"is_fake": False, "sums": sums}))
    for path, content in zip(files, (costs, graphs | {"graph_node_bytes": 9000.5}), strict=True):
        path.write_text(json.dumps(content))
    assert first_calibration.calibrate(tmp_path) == 0
    found = Calibration.read(tmp_path / "calibration.json")
    assert (found.wait_s, found.graph_node_bytes, len(found.all_reduce)) == (1e-5, 9000.5, 2)
    assert found.flops_per_s.keys() == {"bfloat16", "float32", "float8"} and found.float8_bytes_per_s
    assert {one.filters for one in found.sampling} == {"none", "top_k", "top_p", "top_k and top_p"}
    # What cannot be is not kept, and memory that did not change was not measured.
    files[1].write_text(json.dumps(graphs | {"graph_node_bytes": -3.0}))
    assert first_calibration.calibrate(tmp_path) == 0
    assert Calibration.read(tmp_path / "calibration.json").graph_node_bytes is None
    costs["costs"]["launch_s"] = 0.0
    files[0].write_text(json.dumps(costs))
    assert first_calibration.calibrate(tmp_path) == 1
    assert not (tmp_path / "calibration.json").exists()
