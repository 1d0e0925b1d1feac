"""Write a random target and draft that agree as often as wanted, in sizes from 5M to 70B parameters.

    python jobs/make_synthetic.py --shape 350m --acceptance 0.8 --output runs/synthetic/350m
    python jobs/make_synthetic.py --shape 70b --epsilon 0.05 --dtype bfloat16 --output runs/synthetic/70b

The last line on stdout is a JSON document.
"""

import dataclasses
import json
import logging
from pathlib import Path

import torch

from specdist.config.arguments import parse_arguments
from specdist.job.topology import local_device
from specdist.synthetic import SyntheticConfig, build_synthetic
from specdist.utils.errors import UserError, exit_with


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("specdist").setLevel(logging.INFO)
    try:
        config = parse_arguments(SyntheticConfig)
        record = build_synthetic(
            Path(config.output),
            config.shape,
            acceptance=config.acceptance,
            epsilon=config.epsilon,
            seed=config.seed,
            dtype=getattr(torch, config.dtype),
            device=local_device(config.device),
        )
    except UserError as error:
        exit_with(error)
    print(json.dumps(dataclasses.asdict(record)))


if __name__ == "__main__":
    main()
