"""The prompts of a run, opened before anything heavy is imported: a mistake in a path or a column is told at
once, and so is a number of ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, NamedTuple

from specdist.config.generate import GenerateConfig
from specdist.data.formats.prompts import Prompts, open_prompts
from specdist.job.rows.batch_input import batch_options
from specdist.utils.errors import UserError


class _Opened(NamedTuple):
    asked: GenerateConfig
    batch_options: dict[str, Any]
    places: dict[str, Any]
    prompts: Prompts


# What the check has opened, for the run that follows.
_checked: list[_Opened] = []


def check_early(config: GenerateConfig) -> None:
    """Raises :class:`UserError` for prompts that cannot be opened, and where one process is too few. Of
    several ranks rank 0 opens them, when all have met."""
    _checked.clear()
    if "RANK" not in os.environ:
        config.check_world(1)
        options = batch_options(config)
        places = _places(replace(config, **options))
        _checked.append(_Opened(config, options, places, open_prompts(**places)))


def run_batch_options(config: GenerateConfig) -> dict[str, Any]:
    """As of :func:`specdist.job.rows.batch_input.batch_options`."""
    is_known = bool(_checked) and _checked[0].asked == config
    return _checked[0].batch_options if is_known else batch_options(config)


def open_run_prompts(config: GenerateConfig) -> Prompts:
    """Raises :class:`UserError` for a file that cannot be used."""
    places = _places(config)
    is_known = bool(_checked) and _checked[0].places == places
    prompts = _checked.pop().prompts if is_known else open_prompts(**places)
    if config.chat_fingerprint and not prompts.is_chat:
        raise UserError(
            f"--{next(iter(config.chat_fingerprint))} has no effect on plain prompts: name the column of "
            "chat messages with --messages_column, or leave it out"
        )
    return prompts


def _places(config: GenerateConfig) -> dict[str, Any]:
    names = ("prompt_column", "messages_column", "limit", "cache_dir")
    found = {name: getattr(config, name) for name in names}
    return {"path": config.prompts, "has_turns": config.turns_column is not None, **found}
