"""The head of a run's draft, and the digest of weights by which a draft is recognised."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdist.config.generate import GenerateConfig
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.files.damage import reading
from specdist.models.heads.head import TokenHead, load_head
from specdist.models.heads.info import DraftIdentity, HeadInfo, read_head_info
from specdist.policies.registry import HEAD_KINDS

HUB_SNAPSHOTS = "snapshots"
# Blocks of each weight file, spread evenly from its first byte to its last.
NUM_BLOCKS = 256
BLOCK_BYTES = 2**12


@dataclass(frozen=True)
class DraftHead:
    """``network`` is on the CPU, in float32."""

    network: TokenHead
    info: HeadInfo

    def description(self) -> dict[str, Any]:
        """What the manifest says of the draft."""
        names = ("kind", "depth", "max_ratio", "uses_features", "hidden_state", "weights_sha256")
        return {name: getattr(self.info, name) for name in names} | {"draft": self.info.draft.name}


def open_draft_head(config: GenerateConfig, draft: Checkpoint) -> DraftHead | None:
    """The head that the run's policy reads; None for a policy without. Raises :class:`UserError` for a head
    that does not fit."""
    if config.head is None:
        return None
    network = load_head(config.head, kind=HEAD_KINDS[config.policy], draft=identify_draft(draft))
    return DraftHead(network, read_head_info(config.head))


def identify_draft(draft: Checkpoint) -> DraftIdentity:
    """The identity of this checkpoint; reads a megabyte of each weight file."""
    with reading(f"{draft.option} {draft.name}: its weight files", "put them back as they were"):
        fingerprint = _weights_digest(draft)
    return DraftIdentity(
        name=draft.name,
        revision=draft.folder.name if draft.folder.parent.name == HUB_SNAPSHOTS else None,
        architecture=str(draft.config.get_text_config().model_type),
        hidden_size=int(draft.config.get_text_config().hidden_size),
        fingerprint=fingerprint,
    )


def _weights_digest(draft: Checkpoint) -> str:
    """A digest of the weights, without names and tokenizer files.

    It reads blocks from all over the file, since a fine-tuned model may differ from its base in few layers.
    """
    digest = hashlib.sha256()
    for path in draft.weight_files:
        size = path.stat().st_size
        digest.update(f"{size}\0".encode())
        with path.open("rb") as file:
            for start in np.linspace(0, max(0, size - BLOCK_BYTES), NUM_BLOCKS).astype(int):
                file.seek(int(start))
                digest.update(file.read(BLOCK_BYTES))
    if draft.adapter is not None:
        digest.update(draft.adapter.fingerprint().encode())
    return digest.hexdigest()
