"""Which draft a head belongs to: a digest of its weights, read from a small part of them."""

from __future__ import annotations

import hashlib

import numpy as np

from specdist.heads.info import DraftIdentity
from specdist.models.checkpoint import Checkpoint
from specdist.models.damage import reading

HUB_SNAPSHOTS = "snapshots"
# Blocks of each weight file, spread evenly from its first byte to its last.
NUM_BLOCKS = 256
BLOCK_BYTES = 2**12


def identify_draft(draft: Checkpoint) -> DraftIdentity:
    """The identity of this checkpoint. Of each weight file only a megabyte is read."""
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
    """A digest of the weights alone, not of names or tokenizer files.

    The blocks are spread over the file, since a fine-tuned model may differ from its base in a few layers
    only.
    """
    digest = hashlib.sha256()
    for path in draft.weight_files:
        size = path.stat().st_size
        digest.update(f"{size}\0".encode())
        with path.open("rb") as file:
            for start in np.linspace(0, max(0, size - BLOCK_BYTES), NUM_BLOCKS).astype(int):
                file.seek(int(start))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
