"""Train the demo pair, a small target and a smaller draft, on the standard library's documentation.

    python jobs/train_demo.py --output runs/demo

A complete pair is found again and left as it is; an interrupted one is built again.
"""

import logging
import sys

from transformers.utils.logging import disable_progress_bar

from specdist.config.arguments import parse_arguments
from specdist.demo import PairConfig, build_pair, load_corpus
from specdist.utils.errors import UserError, exit_with


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("specdist").setLevel(logging.INFO)
    disable_progress_bar()
    try:
        config = parse_arguments(PairConfig)
        record, is_new = build_pair(config, load_corpus())
    except UserError as error:
        exit_with(error)
    print(
        f"demo pair in {config.output}: {'built' if is_new else 'complete already, built'} in "
        f"{record.wall_s:.0f} s; held-out loss {record.target.held_out_loss:.2f} (target), "
        f"{record.draft.held_out_loss:.2f} (draft); they agree on "
        f"{record.greedy_agreement:.0%} of the target's greedy tokens"
    )


if __name__ == "__main__":
    main()
