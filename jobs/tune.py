"""Find the draft-length policy for a pair of models on this hardware.

    python jobs/tune.py --target TARGET --draft DRAFT --prompts data/prompts.parquet --output runs/tune

The last line on stdout is a JSON document.
"""

import json
import logging

from specdist.config.arguments import parse_arguments
from specdist.tuning import TuneConfig, console_report, run_tuning, summary, write_report
from specdist.utils.errors import UserError, exit_with


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("specdist").setLevel(logging.INFO)
    try:
        result = run_tuning(parse_arguments(TuneConfig))
    except UserError as error:
        exit_with(error)
    write_report(result)
    print(console_report(result), end="\n\n")
    print(json.dumps(summary(result)))


if __name__ == "__main__":
    main()
