"""A run whose prompts are requests in OpenAI's batch format: the options that they ask for."""

from __future__ import annotations

from typing import Any

from specdist.config.generate import GenerateConfig
from specdist.config.processing import STRUCT
from specdist.data.formats.batches import BODY, CONSTRAINT, is_batch, read_batch
from specdist.data.formats.inputs import find_files
from specdist.data.store.copies import fetched
from specdist.utils.errors import UserError


def batch_options(config: GenerateConfig) -> dict[str, Any]:
    """The options of a run over these requests that differ from ``config``'s; none for other prompts.

    Raises :class:`UserError` for requests that cannot be read, or that this run cannot answer.
    """
    if config.messages_column is not None or config.prompt_column not in ("prompt", BODY):
        return {}
    try:
        files = find_files(fetched(config.prompts, config.cache_dir))
        if not is_batch(files):
            return {}
    except (OSError, UserError):
        # Told where the prompts are opened.
        return {}
    batch, _ = read_batch(files)
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
