"""What was measured on a GPU takes the place of the planner's figures, and nothing else does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from specdist.config.generate import parse_arguments
from specdist.lab.plan.calibration import FORMAT, Calibration, MeasuredSampling, MeasuredSum
from specdist.lab.plan.hardware import GPUS, PUBLISHED, Gpu, find_gpu
from specdist.lab.plan.job import open_model
from specdist.lab.plan.roofline import DRAFT_PASS, PACKING_S, TARGET_PASS, Placement
from specdist.utils.errors import UserError
from tests.lab.emulation.config import EmulationConfig
from tests.lab.emulation.run import Emulation
from tests.lab.plan.test_job import planned

MIB = 2**20
MEASURED = Calibration(
    gpu_name="NVIDIA H100 80GB HBM3",
    memory_bytes=85 * 10**9,
    date="2027-01-02T03:04:05+00:00",
    versions={"torch": "2.13.0", "triton": "3.7.1"},
    is_fake=False,
    format=FORMAT,
    read_bytes_per_s=2.5e12,
    float8_bytes_per_s=2e12,
    flops_per_s={"bfloat16": 5e14, "float32": 4e13, "float8": 8e14},
    launch_s=7e-6,
    graph_s=11e-6,
    graph_node_s=1.5e-6,
    wait_s=20e-6,
    graph_node_bytes=700.0,
    all_reduce=tuple(
        MeasuredSum(num_ranks=4, num_bytes=size, seconds=seconds)
        for size, seconds in ((MIB, 30e-6), (16 * 1024, 10e-6), (4 * MIB, 90e-6))
    ),
    sampling=tuple(
        MeasuredSampling(
            filters="top_p", num_rows=rows, vocab_size=128_256, process_s=process_s, draw_s=process_s / 10
        )
        for rows, process_s in ((1, 1e-4), (160, 5e-4))
    ),
)
PLAN = ["--target", "70b", "--draft", "1b", "--gpu", "h100-sxm", "--gpus_per_node", "4",
        "--acceptance", "0.8"]  # fmt: skip


def written(folder: Path, found: Calibration) -> str:
    path = folder / "calibration.json"
    found.write(path)
    return str(path)


def slower(gpu: Gpu, factor: float) -> Calibration:
    """The figures that the planner has of a GPU, so many times as slow."""
    sizes = [16 * 1024 << power for power in range(14)]
    return Calibration(
        gpu_name="NVIDIA H100 80GB HBM3",
        memory_bytes=gpu.memory_bytes,
        date="2027-01-02",
        versions={},
        is_fake=False,
        format=FORMAT,
        read_bytes_per_s=gpu.sustained_bytes_per_s / factor,
        flops_per_s={
            "bfloat16": gpu.sustained_flops_per_s(2) / factor,
            "float32": gpu.sustained_flops_per_s(4) / factor,
        },
        launch_s=factor * gpu.eager_kernel_s,
        graph_s=factor * gpu.graph_s,
        graph_node_s=factor * gpu.kernel_s,
        wait_s=factor * gpu.wait_s,
        all_reduce=tuple(
            MeasuredSum(
                num_ranks=4, num_bytes=size, seconds=factor * gpu.all_reduce_s(size, 4, reads_peers=True)
            )
            for size in sizes
        ),
    )


def test_a_gpu_has_what_was_measured_on_it(tmp_path: Path) -> None:
    path = written(tmp_path, MEASURED)
    assert Calibration.read(Path(path)) == MEASURED
    gpu = find_gpu("h100-sxm", "bfloat16", path)
    assert (gpu.sustained_bytes_per_s, gpu.memory_bytes) == (2.5e12, 85 * 10**9)
    assert (gpu.sustained_flops_per_s(2), gpu.sustained_flops_per_s(4)) == (5e14, 4e13)
    assert gpu.products["float8"] == (0.8, 1.6) and gpu.products["int8"] == GPUS["h100-sxm"].products["int8"]
    assert (gpu.eager_kernel_s, gpu.graph_s, gpu.kernel_s, gpu.wait_s) == (7e-6, 11e-6, 1.5e-6, 20e-6)
    assert gpu.figures == (
        f"measured on one NVIDIA H100 80GB HBM3 on 2027-01-02, {path}; "
        "not measured: sampling with filters none, top_k, top_k and top_p"
    )
    assert gpu.link_bytes_per_s == GPUS["h100-sxm"].link_bytes_per_s


def test_sums_lie_on_lines_between_those_measured(tmp_path: Path) -> None:
    gpu = find_gpu("h100-sxm", "bfloat16", written(tmp_path, MEASURED))
    # Half way from 1 to 4 MiB; below the smallest its latency; beyond the largest 20 us per MiB more.
    assert gpu.all_reduce_s(2.5 * MIB, 4) == pytest.approx(60e-6)
    assert gpu.all_reduce_s(100, 4) == pytest.approx(10e-6)
    assert gpu.all_reduce_s(14 * MIB, 4) == pytest.approx(290e-6)
    assert gpu.all_reduce_s(MIB, 1) == 0
    # Over as many as were not measured, the published rates.
    assert gpu.all_reduce_s(MIB, 8) == GPUS["h100-sxm"].all_reduce_s(MIB, 8) > 0
    more = [MeasuredSum(num_ranks=8, num_bytes=size, seconds=size * 1e-9) for size in (1000, 9000)]
    both = dataclasses.replace(gpu, sums=(*more, *gpu.sums))
    assert both.all_reduce_s(3000, 8) == pytest.approx(3e-6) and both.all_reduce_s(100, 4) == 10e-6


def test_passes_of_a_slower_gpu_are_slower_by_the_same_factor(tmp_path: Path) -> None:
    """All but the host's packing."""
    factor = 2.0
    measured = find_gpu("h100-sxm", "bfloat16", written(tmp_path, slower(GPUS["h100-sxm"], factor)))
    for name, tp_size, counts in (("70b", 4, TARGET_PASS), ("1b", 1, DRAFT_PASS)):
        model, _ = open_model("--target", name, "bfloat16")
        about: dict[str, Any] = {
            "model": model, "tp_size": tp_size, "context_tokens": 1000.0, "counts": counts,
        }  # fmt: skip
        for num_tokens in (1, 32, 192, 2048):
            plain, found = (
                Placement(gpu=gpu, **about).pass_s(num_tokens, min(32, num_tokens)) - PACKING_S
                for gpu in (GPUS["h100-sxm"], measured)
            )
            assert found == pytest.approx(factor * plain, rel=0.002)


def test_plan_and_emulation_use_it_and_say_so(tmp_path: Path) -> None:
    path = written(tmp_path, slower(GPUS["h100-sxm"], 2.0))
    text, published = planned(*PLAN)
    assert f"Figures of the GPU: {PUBLISHED}" in text and published["gpu"]["figures"] == PUBLISHED
    text, document = planned(*PLAN, "--calibration", path)
    assert f"Figures of the GPU: measured on one NVIDIA H100 80GB HBM3 on 2027-01-02, {path};" in text
    assert path in document["gpu"]["figures"]
    assert json.loads(json.dumps(document)) is not None
    (plain,), (found,) = (
        [plan["tokens_per_s"] for plan in each["plans"] if plan["mode"] == "target only"]
        for each in (published, document)
    )
    assert 0.5 <= found / plain < 0.52
    options = ["--emulate", "h100-sxm", "--target", "8b", "--draft", "1b"]
    plain, found = (
        Emulation(parse_arguments(EmulationConfig, [*options, *more])).target
        for more in ([], ["--calibration", path])
    )
    assert path in found.gpu.figures
    assert found.pass_s(8, 8) - PACKING_S == pytest.approx(2 * (plain.pass_s(8, 8) - PACKING_S), rel=0.001)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_fake": True}, r"is_fake is true: .* of no GPU"),
        ({"read_bytes_per_s": 0}, r"read_bytes_per_s is 0.0, but must be a number above 0"),
        ({"wait_s": float("nan")}, r"wait_s is nan, but must be a number above 0"),
        ({"flops_per_s": {"bfloat16": 1e14, "float32": float("inf")}}, r"flops_per_s.float32 is inf"),
        ({"flops_per_s": {"bfloat16": 1e14}}, r"flops_per_s has no float32"),
        ({"flops_per_s": {"float32": 1e14}}, r"flops_per_s has no bfloat16 or float16"),
        ({"all_reduce": [{"num_ranks": 2, "num_bytes": 8, "seconds": 0}]}, r"all_reduce.0.seconds is 0.0"),
        (
            {"all_reduce": [{"num_ranks": 2, "num_bytes": 8, "seconds": 1}]},
            r"all_reduce over 2 GPUs was measured at one size, 8, but lines between sizes need two",
        ),
        (
            {"sampling": [dataclasses.asdict(MEASURED.sampling[0])]},
            r"sampling with filters top_p was measured at one size, 1,",
        ),
        ({"gpu_name": None}, r"gpu_name is missing"),
        ({"format": None}, r"format is missing"),
        ({"format": 1}, r"has format 1, and this version reads 2"),
    ],
)
def test_refusals_name_the_file_and_the_field(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    values = dataclasses.asdict(MEASURED) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    with pytest.raises(UserError, match=rf"--calibration {path}\b.*{message}.*leave --calibration out"):
        Calibration.read(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NVIDIA H100 PCIe", r"was measured on NVIDIA H100 PCIe, which is not a h100-sxm: give h100-pcie"),
        ("NVIDIA A30", r"on NVIDIA A30, which is not a h100-sxm: give the file of such a GPU"),
        ("no file", r"cannot be read: .*No such file"),
    ],
)
def test_a_file_of_another_gpu_is_refused(name: str, message: str, tmp_path: Path) -> None:
    path = str(tmp_path / "calibration.json")
    if name != "no file":
        path = written(tmp_path, dataclasses.replace(MEASURED, gpu_name=name))
    with pytest.raises(UserError, match=rf"--calibration {path}\b.*{message}"):
        planned(*PLAN, "--calibration", path)


def test_names_of_devices_are_those_of_one_row_each() -> None:
    """As drivers call them."""
    names = {
        "NVIDIA B200": "b200", "NVIDIA GB200": "b200", "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "h100-sxm", "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA A100-SXM4-80GB": "a100-80", "NVIDIA A100 80GB PCIe": "a100-80",
        "NVIDIA A100-SXM4-40GB": "a100-40", "NVIDIA A100-PCIE-40GB": "a100-40",
        "NVIDIA L40S": "l40s", "NVIDIA L4": "l4", "NVIDIA A10": "a10", "NVIDIA A10G": "a10",
        "Tesla V100-SXM2-32GB": "v100-32", "NVIDIA GeForce RTX 4090": "rtx-4090",
        "NVIDIA GeForce RTX 3090": "rtx-3090", "NVIDIA B300 SXM6 AC": "b300", "NVIDIA GH200 480GB": "gh200",
        "NVIDIA GH200 120GB": "gh200", "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000-server",
        "NVIDIA GH200 144G HBM3e": "h200", "NVIDIA H100 NVL": "h100-nvl", "NVIDIA H20": "h20",
        "NVIDIA RTX A6000": "a6000", "NVIDIA GeForce RTX 5090": "rtx-5090",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx-pro-6000",
    }  # fmt: skip
    found = {name: [gpu.name for gpu in GPUS.values() if gpu.is_named(name)] for name in names}
    assert found == {name: [row] for name, row in names.items()} and set(names.values()) == set(GPUS)
