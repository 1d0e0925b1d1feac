"""What a rank takes of its GPU's memory, at its peak: never more than was planned."""

from __future__ import annotations

from pathlib import Path

from tests.gpu import check_memory
from tests.gpu.processes import needs_fake_device, on_device
from tests.job.launching import run_here
from tests.job.pair import Pair

pytestmark = needs_fake_device


def test_a_rank_takes_what_it_has_planned_and_writes_what_a_cpu_writes(pair: Pair, tmp_path: Path) -> None:
    options = {
        "prompts": pair.prompts, "target": pair.target, "draft": pair.draft, "dtype": "float32",
        "temperature": 0.7, "top_k": 50, "policy": "fixed", "num_draft_tokens": 3, "max_new_tokens": 6,
        "max_num_seqs": 3, "rows_per_shard": 2, "limit": 4,
    }  # fmt: skip
    assert run_here(**options, device="cpu", output=tmp_path / "cpu").code == 0
    on_device(check_memory.check_a_rank_takes_what_it_has_planned, options, tmp_path)
