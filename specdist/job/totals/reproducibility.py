"""How far a run can be reproduced, and when its draft may change, as its manifest says."""

from __future__ import annotations

from typing import Any

import torch

from specdist.config.generate import GenerateConfig
from specdist.data.run.manifest import UP_TO_ROUNDING
from specdist.data.run.segments import ANY_TIME, BETWEEN_SHARDS, DRAFT_CHANGES, NEVER
from specdist.job.ranks.topology import Topology


def reproducibility(config: GenerateConfig, topology: Topology) -> str:
    """``tokens``: the same seed gives the same tokens, whatever the batch or a restart; ``distribution``: the
    same distribution.

    Block lengths that depend on the rest of the batch change tokens only under rejection, where a block's end
    decides whether a token is the bonus or a verified draft; a draft that works ahead always has a token to
    be verified, unless every round chooses anew whether it does.
    """
    depends_on_batch = config.policy == "goodput" and not config.drafts_ahead
    # Which rows have finished depends on who ran beside them.
    depends_on_batch |= config.memory_rows and config.uses_draft
    depends_on_batch |= config.chooses_rounds and topology.has_draft_rank
    return "distribution" if depends_on_batch and not config.is_coupled else "tokens"


def reproducibility_info(config: GenerateConfig, topology: Topology, dtype: torch.dtype) -> dict[str, Any]:
    """All of it, by its names in the manifest. The libraries' products and sums round in another way where a
    pass has more tokens, on a GPU and in half precision; that can decide between two nearly equal tokens."""
    return {
        "reproducibility": reproducibility(config, topology),
        UP_TO_ROUNDING: topology.device.type == "cuda" or dtype.itemsize < 4,
        DRAFT_CHANGES: draft_changes(config),
    }


def draft_changes(config: GenerateConfig) -> str:
    """When another draft may follow this run's: see :mod:`specdist.data.run.segments`."""
    if not config.is_exact or not config.uses_draft:
        return NEVER
    return ANY_TIME if config.is_coupled else BETWEEN_SHARDS
