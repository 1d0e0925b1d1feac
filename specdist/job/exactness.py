"""What a run may say of its exactness: its policy asks the target, and its target is the one in the files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from specdist.config.generate import GenerateConfig
from specdist.job.preflight import RunPlan
from specdist.models.loading_check import LoadingCheck

CHECK = "loading_check"

logger = logging.getLogger(__name__)


def record_check(config: GenerateConfig, run: RunPlan, check: LoadingCheck) -> bool:
    """Write down, once per run, what the check of the loaded target has found. Returns whether the run is
    exact.

    Replicas and restarts that come later have passed a check of their own, and leave the manifest as it is.
    """
    with run.membership.setup():
        folder = run.folder
        if CHECK not in folder.manifest.info:
            folder.freeze(CHECK, check.to_json())
            folder.freeze("exact", config.is_exact and check.is_checked)
    if check.is_checked:
        logger.info("the loaded target matches its checkpoint: %s", check)
    return bool(folder.manifest.info["exact"])


def exactness_words(config: GenerateConfig, info: Mapping[str, Any]) -> str:
    """What a run may say of it, in a few words. ``info``: the manifest's."""
    if not config.is_exact:
        return "NOT exact: --policy sprinter has kept tokens that the target has not verified"
    if info["exact"]:
        return "exact"
    return f"NOT known to be exact: the loaded target could not be compared with its files ({_reason(info)})"


def _reason(info: Mapping[str, Any]) -> str:
    return str((info.get(CHECK) or {}).get("reason", "no target has been loaded yet"))


def log_exactness(config: GenerateConfig, info: Mapping[str, Any]) -> None:
    """At the start. ``info``: the manifest's."""
    if not config.is_exact:
        logger.warning(
            "NOT exact: --policy sprinter commits tokens that its verifier trusts, unverified by the target; "
            "--verify all verifies every token"
        )
    elif info["exact"]:
        logger.info("exact: the completions follow the target's own distribution")
    else:
        logger.warning(
            "NOT known to be exact: what was loaded could not be compared with an unsharded computation (%s)",
            _reason(info),
        )
