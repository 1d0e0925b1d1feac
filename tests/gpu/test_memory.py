"""What ranks with a GPU each take of its memory, at its peak: never more than was planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import measuring
from tests.gpu.generating import fork_gpu_ranks
from tests.job.launching import run_here, shard_bytes

pytestmark = pytest.mark.ranks

NUM_RANKS = 3


@pytest.mark.parametrize("changes", [{"temperature": 0.7, "top_k": 50}], ids=["rejection, top-k"])
def test_ranks_take_what_they_have_planned(
    options: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    """NCCL has its memory before the cache is sized, whatever it is used for later. Passes are recorded as
    long as there is memory for their kernels, on all ranks of the target alike."""
    given = options | changes | {"cache_memory": None}
    assert run_here(**given, device="cpu", output=tmp_path / "cpu").code == 0
    ended = fork_gpu_ranks(NUM_RANKS, measuring.measuring, **given, tp_size=2, output=tmp_path / "gpu")
    assert ended.totals["num_out_of_memory"] == 0
    lines = [line for line in ended.stderr.splitlines() if line.startswith(measuring.TAKEN)]
    taken = [json.loads(line.removeprefix(measuring.TAKEN)) for line in lines]
    assert len(taken) == NUM_RANKS and 0 < taken[0]["graphs"] == taken[1]["graphs"]
    assert "no further passes are recorded as CUDA graphs" in ended.stderr
    for rank in taken:
        assert rank["connected"] and not rank["late"] and rank["most"] <= rank["planned"], rank
    assert shard_bytes(tmp_path / "gpu") == shard_bytes(tmp_path / "cpu")
