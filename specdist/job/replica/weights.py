"""Where this rank reads the weights of its models from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from specdist.config.generate import GenerateConfig
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.files.staged_files import staged
from specdist.utils.host import process_start_s


def staged_weights(
    config: GenerateConfig, checkpoint: Checkpoint, on_step: Callable[[], None]
) -> AbstractContextManager[Checkpoint]:
    """The checkpoint with its files in ``--stage_weights``, or itself without that option."""
    return staged(
        checkpoint,
        None if config.stage_weights is None else Path(config.stage_weights),
        limit_bytes=config.stage_limit_bytes,
        checked_since=process_start_s(),
        on_step=on_step,
    )
