"""``--draft mtp`` in a job: the target's tokens wherever the head runs, and clear refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.mtp import mtp_head, mtp_target, save_head
from tests.job.launching import read_output, refused, run_here
from tests.job.pair import NUM_VOCAB_TOKENS, Pair, save, train_tokenizer
from tests.job.ranks import fork_ranks

FAMILY = "deepseek_v3"
COUPLED = {"temperature": 1.0, "seed": 7, "acceptance": "gumbel"}


@pytest.fixture(scope="module")
def mtp(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> dict[str, Any]:
    """Options of a job whose target has latent attention, experts, and a head in its files."""
    folder = tmp_path_factory.mktemp("mtp")
    target = mtp_target(FAMILY, NUM_VOCAB_TOKENS, num_hidden_layers=2)
    save(folder / "target", target, train_tokenizer())
    save_head(mtp_head(target), FAMILY, 2, folder / "target")
    return {
        "prompts": pair.prompts,
        "target": folder / "target",
        "draft": "mtp",
        "device": "cpu",
        "max_new_tokens": 8,
        "rows_per_shard": 10,
    }


@pytest.mark.ranks
def test_tokens_are_the_target_s_wherever_the_head_runs(mtp: dict[str, Any], tmp_path: Path) -> None:
    """Coupled: with the head beside the target, and on a rank of its own."""
    run_here(**(mtp | COUPLED | {"draft": None, "policy": "none"}), output=tmp_path / "alone")
    alone = read_output(tmp_path / "alone")["completion_ids"]
    ended = run_here(**mtp, **COUPLED, num_draft_tokens=3, output=tmp_path / "beside")
    assert 0.03 < ended.totals["draft_acceptance_rate"] < 0.9
    fork_ranks(2, **mtp, **COUPLED, num_draft_tokens=3, output=tmp_path / "own")
    for output in ("beside", "own"):
        assert read_output(tmp_path / output)["completion_ids"] == alone, output


def test_a_target_without_a_head_is_refused_before_anything_is_read(
    mtp: dict[str, Any], pair: Pair, no_models: None, tmp_path: Path
) -> None:
    ended = run_here(**(mtp | {"target": pair.target}), output=tmp_path / "run")
    refused(ended, "--draft mtp", "of the family llama, and", "name a draft model with --draft")
