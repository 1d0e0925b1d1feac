"""Train the demo pair, a small target and a smaller draft."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from specdist.cli.ending import tells_mistakes
from specdist.config.arguments import parse_arguments
from specdist.lab.demo.config import PairConfig


@tells_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    """A complete pair is found again and left as it is; an interrupted one is built again."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("specdist").setLevel(logging.INFO)
    config = parse_arguments(PairConfig, arguments)

    from transformers.utils.logging import disable_progress_bar

    from specdist.lab.demo.pair import build_pair
    from specdist.lab.demo.text import load_corpus

    disable_progress_bar()
    record, is_new = build_pair(config, load_corpus())
    print(
        f"demo pair in {config.output}: {'built' if is_new else 'complete already, built'} in "
        f"{record.wall_s:.0f} s; held-out loss {record.target.held_out_loss:.2f} (target), "
        f"{record.draft.held_out_loss:.2f} (draft); they agree on "
        f"{record.greedy_agreement:.0%} of the target's greedy tokens"
    )
    return 0
