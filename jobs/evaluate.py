"""Score what a run has generated, and compare it with another run.

    python jobs/evaluate.py runs/mine --task gsm8k
    python jobs/evaluate.py runs/mine --task humaneval --allow_code_execution
    python jobs/evaluate.py runs/mine --against runs/target-only

The last line on stdout is a JSON document.
"""

import json
import logging

from specdist.config.arguments import parse_arguments
from specdist.evaluation.config import EvaluateConfig
from specdist.evaluation.run import run_evaluation
from specdist.utils.errors import UserError, exit_with


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("specdist").setLevel(logging.INFO)
    try:
        text, document = run_evaluation(parse_arguments(EvaluateConfig, positional="run"))
    except UserError as error:
        exit_with(error)
    print(text, json.dumps(document), sep="\n\n")


if __name__ == "__main__":
    main()
