"""The contents of a report: every panel has data or a reason, and warnings come first."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from markupsafe import escape
from matplotlib.figure import Figure
from matplotlib.text import Text

from specdist.data.run.run_folder import RunFolder
from specdist.job.totals.report import total_stats
from specdist.results.report import write_report
from specdist.results.report.page import draw, make_panels
from specdist.results.report.runs import read_runs
from specdist.results.report.style import report_style
from specdist.utils.errors import UserError
from tests.ranks import REPOSITORY
from tests.results.report.synthetic import BAD_PROMPT, BAD_REASON

MAX_BYTES = 3_000_000
PICTURES = {
    "speed-over-time", "speed-by-shard", "time-per-role", "acceptance-by-position", "block-lengths",
    "acceptance-by-entropy",
}  # fmt: skip


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def sections(text: str) -> dict[str, str]:
    """By name."""
    return dict(re.findall(r'<section id="([\w-]+)">(.*?)</section>', text, re.DOTALL))


@pytest.mark.parametrize("kind", ["plain", "lossy", "unfinished", "alone", "several"])
def test_a_page_needs_nothing_else_and_has_no_empty_panel(pages: dict[str, Path], kind: str) -> None:
    text = read(pages[kind])
    assert len(text) < MAX_BYTES
    assert (
        not re.findall(r'(?:src|href)="(?!data:|#)', text) and "@import" not in text and "<script" not in text
    )
    for name, section in sections(text).items():
        assert re.search(r"<img|<td|class=\"missing\"|<p>", section), f"{name} is empty"
        # A sentence that says how to read it.
        assert len(re.findall(r'<p class="help">[^<]{40,}</p>', section)) == 1, name
    links = re.findall(r'href="#([\w-]+)"', text)
    assert links == list(sections(text))
    pictures = {path.stem for path in pages[kind].parent.glob("*.png")}
    assert pictures == {name for name, section in sections(text).items() if "<img" in section}


def test_the_numbers_are_those_of_the_statistics(pages: dict[str, Path], runs: dict[str, Path]) -> None:
    text, total = read(pages["plain"]), total_stats(RunFolder(runs["plain"]))
    assert set(sections(text)) >= PICTURES
    summary = total.summary(3)
    tiles = dict(re.findall(r'class="label">([^<]*)</div><div class="value">([^<]*)<', text))
    assert tiles["tokens/s"] == f"{summary['tokens_per_s']:,.0f}"
    assert tiles["draft tokens accepted"] == f"{summary['draft_acceptance_rate']:.1%}"
    assert tiles["rows"] == "24" and tiles["error rows"] == "0"
    drafted = total.draft_length_histogram
    assert f"<small>of {sum(drafted[1:]):,}</small>" in sections(text)["acceptance-by-position"]


def test_a_lossy_run_says_so_first(pages: dict[str, Path]) -> None:
    text = read(pages["lossy"])
    assert text.index("is NOT exact") < text.index("<main>") and 'class="banner lossy"' in text
    assert "NOT exact" in sections(text)["configuration"]
    assert "is NOT exact" not in read(pages["plain"])
    assert "lossy is NOT exact" in read(pages["several"])


def test_an_unfinished_run_says_how_far_it_is(pages: dict[str, Path]) -> None:
    text = html.unescape(read(pages["unfinished"]))
    assert "is not finished. 2 of 4 shards and 12 of 24 rows are done" in re.sub("<[^>]+>", "", text)
    assert 'class="banner unfinished"' not in read(pages["plain"])


def test_what_a_run_does_not_have_is_left_out_with_a_reason(pages: dict[str, Path]) -> None:
    alone = sections(read(pages["alone"]))
    assert not {"block-lengths", "acceptance-by-position"} & set(alone)
    assert "--draft" in alone["no-draft"]
    several = sections(read(pages["several"]))
    assert "longer, old: no trace" in several["acceptance-by-entropy"]
    assert "Left out: old." in several["speed-over-time"]


def test_errors_are_listed_and_nothing_in_them_is_markup(pages: dict[str, Path]) -> None:
    errors = sections(read(pages["lossy"]))["errors"]
    assert escape(BAD_REASON) in errors and escape(BAD_PROMPT) in errors
    assert "<b>9000" not in errors and "<script" not in errors
    # Eight rows, which differ in numbers alone, are one kind.
    assert re.search(r"<td[^>]*>the prompt has &lt;b&gt;N&lt;/b&gt; tokens</td><td[^>]*>8</td>", errors)
    assert "every row has a completion" in sections(read(pages["plain"]))["errors"]


def test_runs_are_compared_by_what_differs(pages: dict[str, Path]) -> None:
    text = sections(read(pages["several"]))
    differing = text["configuration"].split("<details>")[0]
    assert "num_draft_tokens" in differing and "max_new_tokens" not in differing
    header = re.search(r"<thead>(.*?)</thead>", text["side-by-side"])
    assert header and re.findall(r">(\w+)</th>", header[1]) == [
        "plain", "longer", "lossy", "unfinished", "alone", "old",
    ]  # fmt: skip


def overlapping_texts(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts of a picture that cover each other."""
    figure.draw_without_rendering()
    hidden: set[Text] = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not low <= tick.get_loc() <= high:
                    hidden |= {tick.label1, tick.label2}
    shown = [
        (text.get_text(), text.get_window_extent())
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and text not in hidden
    ]
    return [
        (one, other)
        for index, (one, box) in enumerate(shown)
        for other, other_box in shown[:index]
        if box.overlaps(other_box)
    ]


def test_the_check_for_overlapping_texts_finds_some() -> None:
    figure = Figure()
    figure.text(0.5, 0.5, "one")
    figure.text(0.51, 0.5, "other")
    assert overlapping_texts(figure) == [("other", "one")]


def test_no_text_in_a_picture_covers_another(runs: dict[str, Path]) -> None:
    for paths in ([runs["lossy"]], [runs["unfinished"]], list(runs.values())):
        panels = make_panels(read_runs(paths))
        with report_style():
            for panel in panels:
                if panel.figure is not None:
                    assert not overlapping_texts(panel.figure), (paths, panel.name)


def test_the_same_run_gives_the_same_pictures(runs: dict[str, Path]) -> None:
    one, other = (draw(make_panels(read_runs([runs["alone"]]))) for _ in range(2))
    assert one == other and set(one) < PICTURES


def test_the_job_writes_beside_the_run_and_refuses_others(runs: dict[str, Path], tmp_path: Path) -> None:
    output = tmp_path / "run"
    shutil.copytree(runs["alone"], output)
    job = [sys.executable, str(REPOSITORY / "jobs" / "report.py")]
    ended = subprocess.run([*job, str(output)], capture_output=True, text=True, check=True)
    document = json.loads(ended.stdout.splitlines()[-1])
    assert Path(document["page"]) == output / "report" / "report.html"
    assert document["num_bytes"] == Path(document["page"]).stat().st_size
    assert all(Path(path).read_bytes().startswith(b"\x89PNG") for path in document["pictures"])
    refused = subprocess.run([*job, str(tmp_path)], capture_output=True, text=True)
    assert refused.returncode == 2 and "is not the folder of a run" in refused.stderr


def test_refusals_say_what_to_do(runs: dict[str, Path], tmp_path: Path) -> None:
    plain, lossy = runs["plain"], runs["lossy"]
    with pytest.raises(UserError, match="--folder"):
        write_report([plain, lossy])
    with pytest.raises(UserError, match="given twice"):
        write_report([plain, plain], folder=tmp_path)
    with pytest.raises(UserError, match="give fewer"):
        write_report([plain] * 7, folder=tmp_path)
    empty = tmp_path / "run"
    empty.mkdir()
    shutil.copy(plain / "manifest.json", empty)
    with pytest.raises(UserError, match=r"no complete shard of its 4 .*status\.py"):
        write_report([empty])
    assert not (tmp_path / "report.html").exists()
