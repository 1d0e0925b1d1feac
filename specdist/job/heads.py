"""The trained head that a run's policy reads, opened before any weights are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdist.config.generate import GenerateConfig
from specdist.heads.drafts import identify_draft
from specdist.heads.head import TokenHead, load_head
from specdist.heads.info import HeadInfo, read_head_info
from specdist.models.checkpoint import Checkpoint
from specdist.policies.options import HEAD_KINDS


@dataclass(frozen=True)
class DraftHead:
    """``network`` is on the CPU, in single precision."""

    network: TokenHead
    info: HeadInfo

    def description(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "kind": self.info.kind,
            "depth": self.info.depth,
            "max_ratio": self.info.max_ratio,
            "uses_features": self.info.uses_features,
            "draft": self.info.draft.name,
            "weights_sha256": self.info.weights_sha256,
        }


def open_draft_head(config: GenerateConfig, draft: Checkpoint) -> DraftHead | None:
    """None where the policy reads none. Raises :class:`UserError` for one that does not fit."""
    if config.head is None:
        return None
    network = load_head(config.head, kind=HEAD_KINDS[config.policy], draft=identify_draft(draft))
    return DraftHead(network, read_head_info(config.head))
