"""The checks of test_first_day.py that need a fake device, each in a process of its own."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.gpu import first_costs, first_drafters, first_graphs
from tests.gpu.first_device import Bench
from tests.gpu.first_kernels import compare_all
from tests.kernels.plain import ON_HOST

RIGHT = dict(ON_HOST)
# As the step calls them.
NAMES = {
    "paged_attention": {
        "attention",
        "attention with sinks and a window",
        "attention to latents",
        "attention over float8",
    },
    "write_tokens": {"write_tokens", "write_tokens as float8"},
    "grouped_packed_product": {"experts, MXFP4", "experts, FP8 in blocks"},
}


def check_wrong_kernels_are_seen(folder: str) -> None:
    """Right kernels pass; a small fault of each kind of comparison fails."""
    bench = Bench(is_fake=True)
    assert wrong_kernels(bench, folder) == set()
    with patch.dict(ON_HOST, FAULTS):
        found = wrong_kernels(bench, folder)
    assert found == {name for kernel in FAULTS for name in NAMES.get(kernel, {kernel})}


def wrong_kernels(bench: Bench, folder: str) -> set[str]:
    """The kernels that the step says are wrong."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = compare_all(bench, Path(folder))
    wrong = {line for line in said.getvalue().splitlines() if line.startswith("WRONG: ")}
    assert code == (1 if wrong else 0)
    found = json.loads(Path(folder, "kernels.json").read_text())["kernels"]
    return {
        one["kernel"] for one in found if any(f"{one['kernel']}, {one['size']}" in line for line in wrong)
    }


def without_the_newest_key(
    queries: Any, keys: Any, values: Any, table: Any, used: Any, *more: Any, **options: Any
) -> Any:
    return RIGHT["paged_attention"](queries, keys, values, table, used - 1, *more, **options)


def not_a_number(*args: Any, **options: Any) -> Any:
    gates = RIGHT["gated_activation"](*args, **options)
    gates[0, 0] = torch.nan
    return gates


def scales_of_the_other(*args: Any) -> None:
    RIGHT["write_tokens"](*args[:-2], *reversed(args[-2:]))


def raising(*_: Any, **__: Any) -> Any:
    raise RuntimeError("an illegal memory access was encountered")


FAULTS: dict[str, Callable[..., Any]] = {
    "paged_attention": without_the_newest_key,
    "draw": lambda *args, **options: RIGHT["draw"](*args, **options) + 1,
    "race": raising,
    "rms_norm": lambda *args, **form: RIGHT["rms_norm"](*args, **(form | {"weight_offset": 1.0})),
    "gated_activation": not_a_number,
    "write_tokens": scales_of_the_other,
    "grouped_packed_product": lambda inputs, ends, *more, **form: RIGHT["grouped_packed_product"](
        inputs, ends // 2, *more, **form
    ),
}


def check_measuring_steps(folder: str) -> None:
    """They end well, and their files say that they mean nothing."""
    bench = Bench(is_fake=True)
    for name, run in (
        ("costs", first_costs.measure_all),
        ("graphs", first_graphs.record_all),
        ("drafters", first_drafters.run_all),
    ):
        assert run(bench, Path(folder, name)) == 0
        (path,) = Path(folder, name).iterdir()
        assert json.loads(path.read_text())["is_fake"] is True
