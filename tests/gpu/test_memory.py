"""What a rank takes of its GPU's memory, at its peak: never more than was planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

import specdist.job.replica.replica
from specdist.job.costs.allocation import CacheRoom
from tests.gpu.device import DEVICE
from tests.gpu.processes import needs_fake_device, on_device
from tests.job.launching import run_here, shard_bytes
from tests.job.pair import Pair

pytestmark = needs_fake_device
MIB = 2**20
_load = PreTrainedModel.from_pretrained.__func__


def test_a_rank_takes_what_it_has_planned_and_writes_what_a_cpu_writes(pair: Pair, tmp_path: Path) -> None:
    options = {
        "prompts": pair.prompts, "target": pair.target, "draft": pair.draft, "dtype": "float32",
        "temperature": 0.7, "top_k": 50, "policy": "fixed", "num_draft_tokens": 3, "max_new_tokens": 6,
        "max_num_seqs": 3, "rows_per_shard": 2, "limit": 4,
    }  # fmt: skip
    assert run_here(**options, device="cpu", output=tmp_path / "cpu").code == 0
    on_device(check_a_rank_takes_what_it_has_planned, options, tmp_path)


def check_a_rank_takes_what_it_has_planned(options: dict[str, Any], folder: Path) -> None:
    """And writes what a CPU writes. Passes are recorded as long as there is memory for their kernels."""
    memory = DEVICE.memory
    memory.total, memory.others, memory.kernel = 3800 * MIB, 512 * MIB, 4 * MIB
    size, rooms = specdist.job.replica.replica.room_for_cache, []

    def noted(*arguments: Any, **given: Any) -> CacheRoom:
        rooms.append(size(*arguments, **given))
        return rooms[-1]

    # The device that is current when the job begins is not the one that it is given.
    torch.cuda.set_device(1)
    PreTrainedModel.from_pretrained = classmethod(_from_pretrained)
    with patch.object(specdist.job.replica.replica, "room_for_cache", noted):
        ended = run_here(**options, device="cuda", output=folder / "gpu")
    assert ended.code == 0, ended.stderr
    assert ended.totals["exact"]
    assert "no further passes are recorded as CUDA graphs" in ended.stderr
    room = rooms[-1]
    assert room.memory is not None and room.needs is not None
    planned = room.memory.total_bytes - room.memory.free_bytes + room.cache_bytes
    planned += room.needs.total - room.needs.graph_nodes + room.graph_bytes
    assert memory.of_graphs > 0 and memory.peak_taken + memory.others <= planned
    assert shard_bytes(folder / "gpu") == shard_bytes(folder / "cpu")
    manifest = json.loads((folder / "gpu/manifest.json").read_text(encoding="utf-8"))
    assert manifest["info"]["up_to_rounding"]


def _from_pretrained(model_class: Any, *args: Any, device_map: Any = None, **options: Any) -> Any:
    """transformers reads weights straight onto a device, in threads that know of none: they are read first,
    then moved."""
    device = (device_map or {}).get("")
    if device is None or device.type != "cuda":
        return _load(model_class, *args, device_map=device_map, **options)
    with _disable_current_modes():
        loaded = _load(model_class, *args, device_map={"": torch.device("cpu")}, **options)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.to(device)
    return loaded
