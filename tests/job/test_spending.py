"""The price of a million tokens, wherever a run's speed is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdist.data.run.run_folder import RunFolder
from specdist.job.totals.card import write_card
from specdist.job.totals.closing import closing_lines
from specdist.job.totals.report import total_stats
from specdist.job.totals.status import StatusReader
from specdist.results.report import write_report
from tests.finished_runs import write_run

# 30 tokens in 6 seconds on three devices: a million take 1e6 / (5 / 3) / 3600 = 166.7 hours of one.
TOLD = "price 600 per million tokens"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = write_run(tmp_path / "run")
    with folder.config_path.open("a") as file:
        file.write("\ngpu_price: 3.6\n")
    return folder


def told(folder: RunFolder) -> dict[str, str]:
    """By where it is told."""
    folder.card_path.unlink(missing_ok=True)
    write_card(folder)
    return {
        "show": "\n".join(closing_lines(folder, total_stats(folder), num_devices=3)),
        "status": "\n".join(StatusReader(folder.path).read().lines()),
        "card": folder.card_path.read_text(),
        "report": write_report([folder.path]).page.read_text(),
    }


def test_what_a_million_tokens_take_is_told_everywhere(folder: RunFolder) -> None:
    found = told(folder)
    assert all(TOLD in found[place] for place in ("show", "status", "card"))
    assert "<td>price of a million tokens</td><td>600</td>" in found["report"]
    assert StatusReader(folder.path).read().to_json()["costs"] == TOLD
