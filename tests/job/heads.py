"""Heads for the pair, in files."""

from __future__ import annotations

from pathlib import Path

from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.heads.head import identify_draft, save_weights
from specdist.models.heads.info import HeadInfo
from specdist.policies import HeadKind
from tests.engine.heads import random_head
from tests.job.pair import Pair


def write_head(folder: Path, kind: HeadKind, draft_folder: Path, *, seed: int = 5) -> Path:
    """An untrained head that doubts half of the tokens. An acceptance head reads features."""
    folder.mkdir(parents=True)
    draft = open_checkpoint("--draft", str(draft_folder))
    head = random_head(draft.config, offset=1.0, seed=seed, uses_features=kind == "acceptance")
    identity = identify_draft(draft)
    info = HeadInfo(
        kind=kind,
        depth=1,
        hidden_size=identity.hidden_size,
        draft=identity,
        weights_sha256=save_weights(head, folder),
        uses_features=head.uses_features,
        max_ratio=1.2 if kind == "verifier" else None,
    )
    info.write(folder)
    return folder


def write_heads(pair: Pair) -> dict[str, Path]:
    """By the policy that reads it."""
    folder = pair.folder / "heads"
    return {
        "specdecpp": write_head(folder / "acceptance", "acceptance", pair.draft),
        "sprinter": write_head(folder / "verifier", "verifier", pair.draft),
    }
