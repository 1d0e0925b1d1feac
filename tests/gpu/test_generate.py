"""The main job on ranks with a fake GPU each writes what ranks on a CPU write.

What such a device cannot show is said in ``tests/gpu/first_day.py``.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.generating import Refereed, fork_gpu_ranks
from tests.gpu.meetings import GLOO, NCCL
from tests.job.heads import write_head
from tests.job.launching import read_output, run_here, shard_bytes
from tests.job.pair import Pair
from tests.job.ranks import fork_ranks

pytestmark = pytest.mark.ranks

NUM_RANKS, DRAFT_RANK = 3, 2
WORLD = "the world"


def check_collectives(ended: Refereed, num_ranks: int = NUM_RANKS) -> None:
    """Every rank of a group has entered each collective equally often, and none is still in one."""
    assert ended.referee.failure is None, ended.referee.failure
    counts = ended.referee.counts
    first, second, draft = (counts[rank] if rank < num_ranks else Counter() for rank in range(NUM_RANKS))
    messages = ("send", "recv")
    for (name, backend, group), number in (first + second + draft).items():
        if name in messages:
            continue
        members = (first, second, draft)[: num_ranks if group == WORLD else 2]
        assert number == len(members) * first[name, backend, group], (name, backend, group)
        assert all(one[name, backend, group] == first[name, backend, group] for one in members)
    for backend in (NCCL, GLOO):
        assert first["send", backend, WORLD] == draft["recv", backend, WORLD]
        assert first["recv", backend, WORLD] == draft["send", backend, WORLD]
    sums = sum(
        number for (name, backend, _), number in second.items() if (name, backend) == ("all_reduce", NCCL)
    )
    sent = first["send", GLOO, WORLD] + first["send", NCCL, WORLD]
    assert sums > 0 and (sent > 0) == (num_ranks > DRAFT_RANK), "neither sharded nor drafted: nothing tested"


@pytest.mark.parametrize(
    ("num_ranks", "changes"),
    [
        pytest.param(3, {}, id="greedy"),
        pytest.param(3, {"temperature": 0.7, "trace": True}, id="rejection, trace"),
        pytest.param(3, {"temperature": 0.9, "top_p": 0.9, "top_k": 50}, id="top-p"),
        pytest.param(3, {"temperature": 0.7, "acceptance": "gumbel"}, id="gumbel"),
        pytest.param(2, {"temperature": 0.7}, id="rejection, shared"),
        pytest.param(2, {"temperature": 0.7, "acceptance": "gumbel"}, id="gumbel, shared"),
    ],
)
def test_gpu_ranks_write_the_files_of_one_process_on_a_cpu(
    options: dict[str, Any], num_ranks: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """The whole files: each row's statistics, and with them the draft's tokens, are the same too. Two ranks
    share the target, and the first of them may hold the draft as well."""
    expected = run_here(**(options | changes), device="cpu", output=tmp_path / "cpu")
    ended = fork_gpu_ranks(num_ranks, **(options | changes), tp_size=2, output=tmp_path / "gpu")
    assert ended.totals["num_rows"] == options["limit"]
    assert ended.totals["exact"], "the loaded target was not compared with its files"
    manifests = [json.loads((tmp_path / run / "manifest.json").read_text()) for run in ("cpu", "gpu")]
    assert [one["info"]["up_to_rounding"] for one in manifests] == [False, True]
    assert shard_bytes(tmp_path / "gpu") == shard_bytes(tmp_path / "cpu")
    for name in ("draft_acceptance_rate", "mean_acceptance_length"):
        assert ended.totals[name] == expected.totals[name]
    assert ended.totals["draft_acceptance_rate"] > 0.1
    assert "without graphs" not in ended.stderr and "not finite" not in ended.stderr
    check_collectives(ended, num_ranks)


@pytest.mark.parametrize("acceptance", ["rejection", "gumbel"])
def test_a_draft_that_works_ahead_with_branches_and_a_head_changes_no_token(
    options: dict[str, Any], pair: Pair, acceptance: str, tmp_path: Path
) -> None:
    """Where blocks end depends on measured times; their tokens do not."""
    changes: dict[str, Any] = {"temperature": 0.7, "acceptance": acceptance}
    ahead = changes | {"overlap": "asynchronous", "num_branches": 2}
    if acceptance == "rejection":
        head = write_head(tmp_path / "head", "acceptance", pair.draft)
        ahead |= {"policy": "specdecpp", "head": head, "max_draft_tokens": 3, "num_draft_tokens": None}
    alone = fork_ranks(2, **(options | ahead), device="cpu", output=tmp_path / "cpu")
    ended = fork_gpu_ranks(NUM_RANKS, **(options | ahead), tp_size=2, output=tmp_path / "gpu")
    assert ended.totals["num_rows"] == alone.totals["num_rows"] == options["limit"]
    assert "the draft works ahead: " in ended.stderr
    expected = read_output(tmp_path / "cpu")["completion_ids"].to_pylist()
    assert read_output(tmp_path / "gpu")["completion_ids"].to_pylist() == expected
    check_collectives(ended)


def test_three_gpu_ranks_in_bfloat16_write_the_tokens_of_a_cpu_in_float32(
    options: dict[str, Any], sharp_pair: Pair, tmp_path: Path
) -> None:
    """With attention by FlashAttention's rules, and models for which rounding changes no token."""
    models = {"target": sharp_pair.target, "draft": sharp_pair.draft}
    expected = run_here(**(options | models), device="cpu", output=tmp_path / "cpu")
    ended = fork_gpu_ranks(
        NUM_RANKS, **(options | models | {"dtype": "bfloat16"}), tp_size=2, output=tmp_path / "gpu"
    )
    assert ended.totals["exact"], "the loaded target was not compared with its files"
    assert "in torch.bfloat16: Triton kernel on pages" in ended.stderr
    rows, wanted = (read_output(tmp_path / run)["completion_ids"].to_pylist() for run in ("gpu", "cpu"))
    assert rows == wanted and len({token for ids in rows for token in ids}) > 10
    for name in ("draft_acceptance_rate", "mean_acceptance_length"):
        assert ended.totals[name] == expected.totals[name]
    assert 0.3 < ended.totals["draft_acceptance_rate"] < 1
    check_collectives(ended)
