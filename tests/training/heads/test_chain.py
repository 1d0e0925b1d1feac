"""From prompts to a head that its draft takes and another refuses, and on to completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdist.cli import collect
from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.heads.head import identify_draft, load_head
from specdist.models.heads.info import HeadKind
from specdist.training.heads.config import TrainConfig
from specdist.training.heads.run import run_training
from specdist.utils.errors import UserError
from tests.job.launching import run_here
from tests.job.pair import Pair


@pytest.mark.parametrize("kind", ["acceptance", "verifier"])
def test_prompts_become_a_head_of_this_draft(kind: HeadKind, pair: Pair, tmp_path: Path) -> None:
    data, output = tmp_path / "data", tmp_path / "head"
    options: dict[str, Any] = {
        "kind": kind, "prompts": pair.prompts, "target": pair.target, "draft": pair.draft, "output": data,
        "device": "cpu", "max_new_tokens": 24, "top_k": 20,
    }  # fmt: skip
    assert run_here(collect, **options).code == 0
    info = run_training(
        TrainConfig(kind=kind, data=str(data), output=str(output), device="cpu", validation_share=0.25)
    )
    assert info.data["training"]["top_k"] == 20 and info.data["training"]["draft"] == str(pair.draft)
    assert 0 < info.metrics["auc"] < 1
    draft = identify_draft(open_checkpoint("--draft", str(pair.draft)))
    head = load_head(output, kind=kind, draft=draft)
    assert head.uses_features == (kind == "acceptance")
    features = torch.full((3, 2), 0.5)
    assert torch.isfinite(head(torch.randn(2, draft.hidden_size), features)).all()
    generated = run_here(
        prompts=pair.prompts, target=pair.target, draft=pair.draft, device="cpu", max_new_tokens=24, top_k=20,
        policy="specdecpp" if kind == "acceptance" else "sprinter", head=output, output=tmp_path / "run",
    )  # fmt: skip
    assert generated.totals["exact"] == (kind == "acceptance")
    assert generated.totals["draft_acceptance_rate"] > 0.2
    # As wide as the draft, and of its family.
    other = identify_draft(open_checkpoint("--draft", str(pair.target)))
    assert other.hidden_size == draft.hidden_size
    with pytest.raises(UserError, match="has other weights"):
        load_head(output, kind=kind, draft=other)
