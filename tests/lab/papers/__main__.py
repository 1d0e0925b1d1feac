"""``python -m tests.lab.papers``: repeat the papers' own tables on a pair of models."""

from __future__ import annotations

import logging
import sys

from specdist.cli import Command
from tests.lab.papers.config import PapersConfig


def repeat(config: PapersConfig) -> tuple[str, None]:
    """Traces that are there are used again; the text to print."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    from tests.lab.papers.run import run_papers

    repeated = run_papers(config)
    return f"{repeated.tables_markdown()}\n\n{repeated.claims_markdown()}", None


main = Command(
    "papers", "repeat the papers' tables", "tests.lab.papers.config:PapersConfig", f"{__name__}:repeat"
)


if __name__ == "__main__":
    sys.exit(main())
