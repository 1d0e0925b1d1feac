"""``python -m tests.lab.papers``: repeat the papers' own tables on a pair of models."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from specdist.cli.ending import tells_mistakes
from specdist.config.arguments import parse_arguments
from tests.lab.papers.config import PapersConfig


@tells_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    """Traces that are there are used again."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    config = parse_arguments(PapersConfig, arguments)

    from tests.lab.papers.run import run_papers

    repeated = run_papers(config)
    print(repeated.tables_markdown(), repeated.claims_markdown(), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
