"""Price and energy of a million tokens, wherever a run's speed is told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.shard import Stats
from specdist.job.costs import energy
from specdist.job.ranks.topology import Topology
from specdist.job.totals.card import write_card
from specdist.job.totals.closing import closing_lines
from specdist.job.totals.report import total_stats
from specdist.job.totals.spending import GpuCosts
from specdist.job.totals.status import StatusReader
from specdist.lab.plan.job import run_plan
from specdist.lab.plan.options import PlanConfig
from specdist.results.report.overview import summary_tiles
from specdist.results.report.runs import read_run
from tests.finished_runs import write_run

# 30 tokens in 6 seconds on three devices: a million take 1e6 / (5 / 3) / 3600 = 166.7 hours of one.
TOLD = "price 600 and 100 kWh per million tokens"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = write_run(tmp_path / "run")
    with folder.config_path.open("a") as file:
        file.write("\ngpu_price: 3.6\ngpu_watts: 600\n")
    return folder


def told(folder: RunFolder) -> dict[str, str]:
    """By where it is told."""
    folder.card_path.unlink(missing_ok=True)
    write_card(folder)
    return {
        "show": "\n".join(closing_lines(folder, total_stats(folder), num_devices=3)),
        "status": "\n".join(StatusReader(folder.path).read().lines()),
        "card": folder.card_path.read_text(),
        "report": str(summary_tiles(read_run(folder.path, "run"))),
    }


def test_what_a_million_tokens_take_is_told_everywhere(folder: RunFolder) -> None:
    found = told(folder)
    assert all(TOLD in found[place] for place in ("show", "status", "card"))
    assert "price of a million tokens" in found["report"] and ">600<" in found["report"]
    assert "kWh for a million tokens" in found["report"] and ">100<" in found["report"]
    assert StatusReader(folder.path).read().to_json()["costs"] == TOLD


def test_what_was_not_given_is_not_told(folder: RunFolder) -> None:
    text = folder.config_path.read_text()
    folder.config_path.write_text(text.replace("gpu_price: 3.6", "gpu_price: null"))
    assert all("100 kWh per million" in told(folder)[place] for place in ("show", "status", "card"))
    assert not any("price" in each for each in told(folder).values())
    folder.config_path.unlink()
    assert not any("million" in each or "kWh" in each for each in told(folder).values())
    assert "costs" not in StatusReader(folder.path).read().to_json()
    assert GpuCosts(2.0, 700.0).text(None) == ""


class Nvml:
    """NVIDIA's library on a machine with two GPUs, each of which takes 100 W, a second passing with each look
    at it."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.joules, self.is_lost = {"GPU-a": 5000, "GPU-b": 7000}, False

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.joules:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if self.is_lost:
            raise self.NVMLError("GPU is lost")
        self.joules[handle] += 100
        return 1000 * self.joules[handle]


def replica_of(
    monkeypatch: pytest.MonkeyPatch, nvml: Nvml | None, places: list[tuple[str, str | None]]
) -> Any:
    """The meter of a replica whose ranks are in these places, on its rank 0."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(energy, "gathered", lambda topology, place: places)
    monkeypatch.setattr(energy, "_uuid", lambda device: "a")
    return energy.energy_meter(
        Topology(
            rank=0,
            world_size=len(places),
            tp_size=len(places),
            uses_draft=False,
            device=torch.device("cuda", 0),
        )
    )


def test_gpus_counters_are_read_with_each_shard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml, found = Nvml(), Stats()
    meter = replica_of(monkeypatch, nvml, [("here", "a"), ("here", "b"), ("here", "a")])
    for num_tokens in (30, 50):
        meter.count(num_tokens)
    meter.read(found)
    meter.count(20)
    nvml.is_lost = True
    meter.read(found)
    # Those 20 are told of with what was taken for them.
    assert (found.num_millijoules, found.num_metered_tokens) == (200_000, 80)
    nvml.is_lost = False
    meter.read(found)
    assert (found.num_millijoules, found.num_metered_tokens) == (400_000, 100)
    nvml.joules["GPU-a"] = 0
    meter.read(found)
    assert (found.num_millijoules, found.num_metered_tokens) == (400_000, 100)
    # 4 joules for a token are 1.11 kWh for a million.
    assert found.summary()["measured_kwh_per_million_tokens"] == pytest.approx(4e6 / 3.6e6)
    folder = write_run(tmp_path / "run")
    monkeypatch.setattr(Stats, "summary", with_energy(Stats.summary))
    assert all("1.11 kWh of its GPUs (measured) per million" in told(folder)[place]
               for place in ("show", "status", "card"))  # fmt: skip
    assert "kWh of the GPUs for a million tokens" in told(folder)["report"]
    with folder.config_path.open("a") as file:
        file.write("\ngpu_watts: 600\n")
    assert not any("measured" in each for each in told(folder).values())


def with_energy(summary: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    return lambda stats, num_devices=1: {
        **summary(stats, num_devices), "measured_kwh_per_million_tokens": 4 / 3.6,
    }  # fmt: skip


@pytest.mark.parametrize(
    "places", [[("here", "a"), ("there", "b")], [("here", "a"), ("here", None)], [("here", "c")]]
)
def test_what_nobody_counts_is_not_told(
    monkeypatch: pytest.MonkeyPatch, places: list[tuple[str, str | None]]
) -> None:
    """GPUs of two machines, one that torch cannot name, and one that the library does not know; or no
    library."""
    assert replica_of(monkeypatch, Nvml(), places) is None
    assert replica_of(monkeypatch, None, [("here", "a")]) is None
    assert Stats().summary()["measured_kwh_per_million_tokens"] is None


def test_plans_have_their_costs() -> None:
    options = {"target": "8b", "gpu": "h100-sxm", "num_prompts": 64}
    text, document = run_plan(PlanConfig(**options, gpu_price=2.5, gpu_watts=700), "plan")
    chosen = document["recommended"]
    hours = 1e6 / chosen["tokens_per_s_per_gpu"] / 3600
    assert chosen["price_per_million_tokens"] == pytest.approx(2.5 * hours)
    assert chosen["kwh_per_million_tokens"] == pytest.approx(0.7 * hours)
    assert "price per M" in text and "kWh per M" in text
    assert (document["options"]["gpu_price"], document["options"]["gpu_watts"]) == (2.5, 700)
    plain, without = run_plan(PlanConfig(**options), "plan")
    assert "per M" not in plain and "price_per_million_tokens" not in without["recommended"]
