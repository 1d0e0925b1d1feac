"""Train a head on the draft from what jobs/collect.py has left.

    python jobs/train_head.py --kind acceptance --data runs/examples --output runs/head

The last line on stdout is a JSON document.
"""

import json
import logging

from specdist.config.arguments import parse_arguments
from specdist.training.config import TrainConfig
from specdist.training.run import run_training
from specdist.utils.errors import UserError, exit_with


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("specdist").setLevel(logging.INFO)
    try:
        config = parse_arguments(TrainConfig)
        info = run_training(config)
    except UserError as error:
        exit_with(error)
    metrics = {name: value for name, value in info.metrics.items() if name != "history"}
    print(json.dumps({"output": config.output, "kind": info.kind, **metrics}))


if __name__ == "__main__":
    main()
