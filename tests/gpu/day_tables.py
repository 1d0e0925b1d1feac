"""What a first day (:mod:`tests.gpu.first_day`) measured on a GPU, as tables for the benchmarks' pages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from specdist.lab.plan.hardware import find_gpu
from specdist.lab.plan.roofline import Placement
from specdist.models.sizes.sizes import model_size
from specdist.utils.table import Table, decimals
from tests.gpu.first_device import LLAMA
from tests.ranks import REPOSITORY

GPU, MODEL, CONTEXT = "h200", "8B", 512
DAY = REPOSITORY / "jobs/benchmarks" / GPU
# The form of attention's tiles before the day: rows, keys, warps, stages.
BEFORE = (64, 32, 8, 3)
# As kernels.json and tiles.json name their cases.
CASES = {"decode": "decode", "decode, long": "long", "verify": "verify", "prompt": "prompt", "chunk": "chunk"}
US, MS = 1e6, 1e3
BYTES_PER_NUMBER = 2

Row = dict[str, str | int | None]


def markdown() -> str:
    parts = (
        "Attention in bfloat16, one layer: microseconds with a cold cache, before and with the tiles that "
        "were chosen on this day:",
        _table(_attention(), names=2),
        f"Forwards of a model of {MODEL} after {CONTEXT} tokens, in milliseconds with the host's work, and "
        "what `jobs/plan.py` predicts of them, from published peaks and with `--calibration`:",
        _table(_forwards(), names=2),
        "All products of a layer, in microseconds: as they are, and with queries, keys and values as one "
        "product and the two of the gate as another (tried; the job does not do that):",
        _table(_products(), names=2),
        "Rounds of an 8B target and a 1B draft on this GPU, 4 draft tokens, 512 tokens of prompt, in "
        "milliseconds; random models have the flattest logits for top-p (before the tiles changed):",
        _table(_rounds(), names=2),
        "Steps of the first day: " + ", ".join(_steps()) + ".",
    )
    return "\n\n".join(parts)


def _read(name: str) -> Any:
    return json.loads((DAY / f"{name}.json").read_text(encoding="utf-8"))


def _table(rows: Iterator[Row], names: int) -> str:
    return Table.of(list(rows), num_names=names).markdown()


def _attention() -> Iterator[Row]:
    form = ("rows", "keys", "warps", "stages")
    before = {
        (one["model"], one["case"]): one["us"]
        for one in _read("tiles")["tiles"]
        if tuple(one[name] for name in form) == BEFORE
    }
    for kernel in _read("kernels")["kernels"]:
        if kernel["kernel"] != "attention":
            continue
        case, _, lengths = kernel["size"].partition(": ")
        old, new = before[kernel["model"], CASES[case]], US * kernel["seconds"]
        yield {
            "model": kernel["model"],
            "queries x segments": f"{case} ({lengths})",
            "before": decimals(old, 0),
            "now": decimals(new, 0),
            "before / now": decimals(old / new),
            "GB/s": decimals(kernel["gb_per_s"], 0),
            "TFLOP/s": decimals(kernel["tflop_per_s"], 0),
        }


def _forwards() -> Iterator[Row]:
    size = model_size(MODEL, LLAMA[MODEL].config, BYTES_PER_NUMBER)
    published, calibrated = (
        Placement(model=size, gpu=find_gpu(GPU, "bfloat16", file), context_tokens=CONTEXT)
        for file in (None, str(DAY / "calibration.json"))
    )
    for one in _read("graphs")["passes"]:
        num_rows, num_tokens = one["num_rows"], one["num_tokens"]
        replayed_s = one["replayed_s"]
        row: Row = {
            "sequences": num_rows,
            "tokens of each": num_tokens,
            "unrecorded": decimals(MS * one["eager_s"]),
            "replayed": decimals(MS * replayed_s),
        }
        for name, placement in (("published peaks", published), ("calibrated", calibrated)):
            predicted_s = placement.pass_s(num_rows * num_tokens, num_rows)
            row[f"predicted / replayed, {name}"] = decimals(predicted_s / replayed_s)
        yield row


def _products() -> Iterator[Row]:
    found = _read("tiles")["products"]
    times = {(one["model"], one["num_tokens"], one["form"]): one["us"] for one in found}
    for model, num_tokens in dict.fromkeys((one["model"], one["num_tokens"]) for one in found):
        apart, joined = (times[model, num_tokens, form] for form in ("apart", "joined"))
        yield {
            "model": model,
            "tokens": num_tokens,
            "as they are": decimals(apart, 0),
            "joined": decimals(joined, 0),
            "ratio": decimals(apart / joined),
        }


def _rounds() -> Iterator[Row]:
    for one in _read("round")["rounds"]:
        waits_ms = one["host_ms"] + one["idle_ms"] - one["draft_ms"]
        yield {
            "sampling": one["setting"],
            "sequences": one["batch_size"],
            "round": decimals(one["round_ms"], 1),
            "verification": decimals(one["verify_ms"], 1),
            "draft": decimals(one["draft_ms"], 1),
            "neither runs": decimals(waits_ms, 1),
        }


def _steps() -> Iterator[str]:
    for one in _read("results")["results"]:
        yield f"{one['name']} {one['outcome']} ({one['seconds']:.0f} s)"
