"""Which kind of drafter a configuration is of: asked here and nowhere else."""

from __future__ import annotations

from typing import Any

from specdist.models.draft_models.block import BLOCK
from specdist.models.draft_models.declaration import Drafter
from specdist.models.draft_models.eagle3 import EAGLE3, PEAGLE
from specdist.models.draft_models.mtp import MTP

DRAFTERS: tuple[Drafter, ...] = (PEAGLE, EAGLE3, BLOCK, MTP)


def drafter_of(config: Any) -> Drafter | None:
    """The kind of drafter; None for a model that runs without a target's states."""
    return next((kind for kind in DRAFTERS if kind.fits(config)), None)
