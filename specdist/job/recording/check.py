"""What the check of the loaded target has found, in the manifest."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from specdist.config.generate import GenerateConfig
from specdist.data.run.manifest import seed_says
from specdist.job.run.preflight import RunPlan
from specdist.job.totals.closing import CHECK, exactness
from specdist.models.start_check.loading_check import LoadingCheck

logger = logging.getLogger(__name__)


def record_check(
    config: GenerateConfig, run: RunPlan, check: LoadingCheck, choices: Mapping[str, Any]
) -> bool:
    """Write the result of the check of the loaded target into the manifest, once per run, with the
    ``choices`` of its sums over the ranks and its products, by their names there; return whether the run is
    exact.

    Later replicas and restarts have passed a check of their own, and leave the manifest as it is.
    """
    folder = run.folder
    if CHECK not in folder.manifest.info:
        with run.membership.setup():
            if CHECK not in folder.manifest.info:
                for name, choice in choices.items():
                    folder.freeze(name, choice)
                # In this order: where there is a check, ``exact`` is what it found.
                folder.freeze("exact", config.is_exact and check.is_checked)
                folder.freeze(CHECK, check.to_json())
    if check.is_checked:
        logger.info("the loaded target matches its checkpoint: %s", check)
    is_exact = bool(folder.manifest.info["exact"])
    logger.info("--seed %d: %s", config.seed, seed_says(folder.manifest))
    if not is_exact:
        hint = "" if config.is_exact else "; --verify all verifies every token"
        logger.warning("%s%s", exactness(folder.manifest), hint)
    return is_exact
