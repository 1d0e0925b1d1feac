"""Generate completions for a data set of prompts."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from specdist.cli.ending import heavy_imports, tells_mistakes
from specdist.config.arguments import parse_given
from specdist.config.generate import GenerateConfig
from specdist.utils.errors import UserError

TENSORBOARD_PACKAGE = "tensorboardX"


@tells_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank of the job; returns its exit code: 0 if the run is complete, ``EXIT_STOPPED`` if it was
    stopped. Rank 0's last line on stdout is a JSON document."""
    config, given = parse_given(GenerateConfig, arguments)
    if config.tensorboard:
        check_tensorboard()

    with heavy_imports():
        from specdist.job.generate import run_generation

    return run_generation(config, given)


def check_tensorboard() -> None:
    """Raises :class:`UserError` if the package that writes the files is not installed."""
    if importlib.util.find_spec(TENSORBOARD_PACKAGE) is None:
        raise UserError(
            f"--tensorboard needs the package {TENSORBOARD_PACKAGE}, which is not installed: "
            "pip install -e '.[tensorboard]' in specdist's folder, or leave --tensorboard out; stats/ has "
            "the same figures for every shard"
        )
