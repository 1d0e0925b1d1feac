"""The prompts of a run, opened before anything heavy is imported: a mistake in a path or a column is told at
once, and so is a number of ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from specdist.config.generate import GenerateConfig
from specdist.config.groups import values_of
from specdist.config.processing import STRUCT
from specdist.config.prompts import TurnOptions
from specdist.data.formats.batches import BODY, CONSTRAINT
from specdist.data.formats.inputs import files_at, globbed, shown
from specdist.data.formats.prompts import Prompts, open_prompts
from specdist.data.formats.templates import PromptTemplate
from specdist.data.run.run_folder import run_of
from specdist.data.store.copies import fetched
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
        config.check_world(ranks_to_fork(config) or 1)
        run_batch_options(config)


def ranks_to_fork(config: GenerateConfig) -> int:
    """The ranks of a sharded target on CPUs, if this process is to be their launcher; otherwise 0."""
    is_launcher = config.tp_size > 1 and config.device == "cpu" and "RANK" not in os.environ
    return config.num_world_ranks if is_launcher else 0


def run_batch_options(config: GenerateConfig) -> dict[str, Any]:
    """The options that differ from ``config``'s in a run over requests in OpenAI's batch format; none for
    other prompts. Raises :class:`UserError` for prompts that cannot be opened, and for requests that this run
    cannot answer."""
    if not _opened or _opened[0].asked != config:
        prompts = _open(config)
        _opened[:] = [_Opened(config, _batch_options(config, prompts), prompts)]
    return _opened[0].batch_options


def _batch_options(config: GenerateConfig, prompts: Prompts) -> dict[str, Any]:
    batch = prompts.batch
    if batch is None:
        return {}
    if config.rollout is not None:
        raise UserError(
            f"--rollout {config.rollout} cannot judge --prompts {shown(config.prompts)}: requests of "
            "OpenAI's batch format get one answer each; leave it out, or give the messages in "
            "--messages_column"
        )
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
    is_known = bool(_opened) and _places(replace(_opened[0].asked, **_opened[0].batch_options)) == _places(
        config
    )
    prompts = _opened.pop().prompts if is_known else _open(config)
    if config.chat_fingerprint and not prompts.is_chat:
        raise UserError(
            f"--{next(iter(config.chat_fingerprint))} has no effect on plain prompts: name the column of "
            "chat messages with --messages_column, or leave it out"
        )
    return prompts


def _places(config: GenerateConfig) -> dict[str, Any]:
    more = {name: getattr(config, name) for name in ("output", "limit", "cache_dir")}
    return values_of(config, TurnOptions) | more


def _open(config: GenerateConfig) -> Prompts:
    """The rows of files, or of a run. Raises :class:`UserError`."""
    template, text = None, config.prompt_template
    if text is not None:
        template = PromptTemplate(text, system_prompt=config.system_prompt, is_chat=config.chat)
    output, files, is_run = Path(config.output).resolve(), list[Path](), False
    for path in globbed(config.prompts):
        # Two URLs are compared alike.
        if config.output and Path(path).resolve() in (output, output / "shards"):
            raise UserError(f"--prompts {path} is in --output {config.output}: write to another folder")
        place = fetched(path, config.cache_dir)
        run = run_of(place)
        is_run |= run is not None
        files += files_at(path, place) if run is None else run.finished_files(unfinished=config.unfinished)
    if config.unfinished and not is_run:
        raise UserError(
            f"--unfinished has no effect: --prompts {shown(config.prompts)} is not a run's folder; leave it "
            "out"
        )
    names = ("prompt_column", "messages_column", "limit", "cache_dir", "keep_errors")
    return open_prompts(
        config.prompts,
        has_turns=config.turns_column is not None,
        files=files,
        template=template,
        **{name: getattr(config, name) for name in names},
    )
