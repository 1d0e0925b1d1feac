"""What a run would take, before any GPU is used: does it fit, how fast, and which way to run it.

    python jobs/plan.py --target meta-llama/Llama-3.3-70B-Instruct --draft meta-llama/Llama-3.2-1B-Instruct \\
        --gpu h100-sxm --gpus_per_node 8 --acceptance 0.8 --output_config plan.yaml
    python jobs/plan.py --target 70b --draft 1b --gpu h100-sxm --gpus_per_node 5 --memory
    python jobs/plan.py --validate --target runs/pair/target --draft runs/pair/draft --prompt_tokens 16

The last line on stdout is a JSON document.
"""

import json
import logging
import shlex
import sys

from specdist.config.arguments import parse_arguments
from specdist.planning.job import run_plan
from specdist.planning.options import PlanConfig
from specdist.utils.errors import UserError, exit_with


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("specdist").setLevel(logging.INFO)
    try:
        config = parse_arguments(PlanConfig)
        text, document = run_plan(config, shlex.join(["python", "jobs/plan.py", *sys.argv[1:]]))
    except UserError as error:
        exit_with(error)
    print(text, json.dumps(document), sep="\n\n")


if __name__ == "__main__":
    main()
