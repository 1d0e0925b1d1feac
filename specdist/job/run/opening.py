"""The prompts of a run, opened before anything heavy is imported: a mistake in a path or a column is told at
once, and so is a number of ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, NamedTuple

from specdist.config.generate import GenerateConfig
from specdist.config.processing import STRUCT
from specdist.data.formats.batches import BODY, CONSTRAINT
from specdist.data.formats.prompts import Prompts, open_prompts
from specdist.utils.errors import UserError


class _Opened(NamedTuple):
    asked: GenerateConfig
    batch_options: dict[str, Any]
    prompts: Prompts


# What has been opened for the run that follows.
_opened: list[_Opened] = []


def check_early(config: GenerateConfig) -> None:
    """Raises :class:`UserError` for prompts that cannot be opened, and where one process is too few. Of
    several ranks rank 0 opens them, when all have met."""
    _opened.clear()
    if "RANK" not in os.environ:
        config.check_world(1)
        run_batch_options(config)


def run_batch_options(config: GenerateConfig) -> dict[str, Any]:
    """The options that differ from ``config``'s in a run over requests in OpenAI's batch format; none for
    other prompts. Raises :class:`UserError` for prompts that cannot be opened, and for requests that this run
    cannot answer."""
    if not _opened or _opened[0].asked != config:
        prompts = open_prompts(**_places(config))
        _opened[:] = [_Opened(config, _batch_options(config, prompts), prompts)]
    return _opened[0].batch_options


def _batch_options(config: GenerateConfig, prompts: Prompts) -> dict[str, Any]:
    batch = prompts.batch
    if batch is None:
        return {}
    found: dict[str, Any] = {"prompt_column": BODY}
    if batch.options:
        found["row_options"] = [*(config.row_options or []), STRUCT]
    if batch.has_constraints:
        if config.constraint_column not in (None, CONSTRAINT):
            raise UserError(
                f"--constraint_column {config.constraint_column} is not a column of requests, whose "
                "constraints are in response_format: leave it out"
            )
        found["constraint_column"] = CONSTRAINT
    if batch.num_logprobs is not None:
        found["logprobs"] = max(batch.num_logprobs, config.logprobs or 0)
    return found


def open_run_prompts(config: GenerateConfig) -> Prompts:
    """Raises :class:`UserError` for a file that cannot be used."""
    places = _places(config)
    is_open = bool(_opened) and _places(replace(_opened[0].asked, **_opened[0].batch_options)) == places
    prompts = _opened.pop().prompts if is_open else open_prompts(**places)
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
