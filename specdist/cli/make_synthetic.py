"""Write a random target and draft with a given acceptance rate."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from specdist.cli.ending import log_to_stderr, tells_mistakes
from specdist.config.arguments import parse_arguments
from specdist.lab.synthetic.config import SyntheticConfig


@tells_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    """The last line on stdout is a JSON document."""
    log_to_stderr()
    config = parse_arguments(SyntheticConfig, arguments)

    import torch

    from specdist.job.ranks.topology import local_device
    from specdist.lab.synthetic.build import build_synthetic

    record = build_synthetic(
        Path(config.output),
        config.shape,
        acceptance=config.acceptance,
        epsilon=config.epsilon,
        seed=config.seed,
        dtype=getattr(torch, config.dtype),
        device=local_device(config.device),
    )
    print(json.dumps(dataclasses.asdict(record)))
    return 0
