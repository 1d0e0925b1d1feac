"""EAGLE-3 drafts in a run: what they allow, and their files."""

from __future__ import annotations

import dataclasses
import logging

from specdist.config.generate import GenerateConfig
from specdist.models.eagle.eagle_loading import check_eagle
from specdist.models.files.checkpoint import Checkpoint
from specdist.policies.registry import AUTO
from specdist.utils.errors import UserError

logger = logging.getLogger(__name__)


def check_eagle_run(
    config: GenerateConfig, target: Checkpoint, draft: Checkpoint, *, may_read_states: bool
) -> None:
    """Raises :class:`UserError` for a draft that does not fit the target, and for options that it cannot
    have."""
    what = f"--draft {draft.name}"
    if not may_read_states:
        raise UserError(
            f"{what} is an EAGLE-3 draft, which jobs/generate.py alone can use: name a draft that runs "
            "without the target's states"
        )
    why = f"{what} is an EAGLE-3 draft, which reads the states of its one target in turns with it"
    given = {
        "overlap ahead": config.overlap == "ahead",
        "draft_window": config.draft_window is not None,
        "head": config.head is not None,
        "draft_quantization": config.draft_quantization is not None,
        "draft_adapter": config.draft_adapter is not None,
        f"model_impl {config.model_impl}": config.model_impl == "specdist",
    }
    for name, is_given in given.items():
        if is_given:
            raise UserError(f"{why}: leave out --{name}, or choose a draft model of its own")
    check_eagle(draft, target)


def settled(config: GenerateConfig, draft: Checkpoint | None) -> GenerateConfig:
    """The options as the draft needs them: one that reads the target's states takes turns with it."""
    if draft is None or not draft.is_eagle or config.overlap != AUTO:
        return config
    logger.info("--draft %s is an EAGLE-3 draft, which takes turns with its target", draft.name)
    return dataclasses.replace(config, overlap="none")
