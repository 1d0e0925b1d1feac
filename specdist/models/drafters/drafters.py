"""Checks and loads a drafter of the target's states, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from transformers import PreTrainedModel

from specdist.models.draft_models.block import BLOCK
from specdist.models.draft_models.declaration import Drafter, Placement
from specdist.models.draft_models.eagle3 import EAGLE3, PEAGLE
from specdist.models.draft_models.mtp import MTP
from specdist.models.drafters.mtp_loading import check_mtp, load_mtp
from specdist.models.drafters.own_files import check_own_files, load_own_files
from specdist.models.drafters.runner import DrafterRunner
from specdist.models.files.checkpoint import Checkpoint


class _Loading(NamedTuple):
    check: Callable[[Checkpoint, Checkpoint], None]
    load: Callable[[Checkpoint, Checkpoint, Placement], PreTrainedModel]


LOADINGS: dict[Drafter, _Loading] = {
    EAGLE3: _Loading(check_own_files, load_own_files),
    PEAGLE: _Loading(check_own_files, load_own_files),
    MTP: _Loading(check_mtp, load_mtp),
    BLOCK: _Loading(check_own_files, load_own_files),
}


def check_drafter(draft: Checkpoint, target: Checkpoint) -> None:
    """Compare the drafter with its target, and with the headers of its files.

    Raises :class:`UserError` for one of another target, or of a form that is not read here.
    """
    assert draft.drafter is not None
    LOADINGS[draft.drafter].check(draft, target)


def load_drafter(
    draft: Checkpoint, target: Checkpoint, placement: Placement, on_pass: Callable[[], None] | None = None
) -> DrafterRunner:
    """Raises :class:`UserError` if files have changed since they were checked."""
    assert draft.drafter is not None
    model = LOADINGS[draft.drafter].load(draft, target, placement)
    return DrafterRunner(model, placement.device, draft.drafter, on_pass, draft.has_float8_cache)
