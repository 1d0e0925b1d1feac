"""The contents of a report: every figure or the reason why it is left out, and warnings come first."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path

import pytest

from specdist.cli import report
from specdist.data.run.run_folder import RunFolder
from specdist.job.totals.report import total_stats
from specdist.results.report import write_report
from specdist.utils.errors import UserError

MAX_BYTES = 3_000_000
FIGURES = [
    "speed-over-time", "shards", "time-per-role", "block-lengths", "acceptance", "completion-lengths"
]  # fmt: skip
OF_DRAFTS = {"block-lengths", "acceptance"}


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def sections(text: str) -> dict[str, str]:
    """By name."""
    return dict(re.findall(r'<section id="([\w-]+)"[^>]*>(.*?)</section>', text, re.DOTALL))


def lines(text: str) -> dict[str, list[str]]:
    """The values of the table's lines, one per run."""
    rows = re.findall(r"<tr>(<td>.*?)</tr>", sections(text)["numbers"])
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in rows]
    return {name: values for name, *values in cells}


@pytest.mark.parametrize("kind", ["plain", "lossy", "unfinished", "alone", "failed", "several"])
def test_a_page_needs_nothing_else_and_has_six_figures(pages: dict[str, Path], kind: str) -> None:
    text = read(pages[kind])
    assert len(text) < MAX_BYTES
    assert (
        not re.findall(r'(?:src|href)="(?!data:|#)', text) and "@import" not in text and "<script" not in text
    )
    found = sections(text)
    assert list(found) == re.findall(r'href="#([\w-]+)"', text) == [*FIGURES, "numbers", "errors"]
    for name in FIGURES:
        # A sentence that says how to read it, and a picture or a reason why there is none.
        assert len(re.findall(r'<p class="help">[^<]{40,}</p>', found[name])) == 1, name
        assert "<img" in found[name] or '<p class="note">' in found[name], name
    pictures = {path.stem for path in pages[kind].parent.glob("*.png")}
    assert pictures == {name for name, section in found.items() if "<img" in section}
    missing = {"alone": OF_DRAFTS, "failed": {*FIGURES}}
    assert pictures == {*FIGURES} - missing.get(kind, set())


def test_the_numbers_are_those_of_the_statistics(pages: dict[str, Path], runs: dict[str, Path]) -> None:
    found, total = lines(read(pages["plain"])), total_stats(RunFolder(runs["plain"]))
    summary = total.summary(3)
    expected = {
        "tokens_per_s": f"{summary['tokens_per_s']:,.4g}",
        "tokens_per_s_per_device": f"{summary['tokens_per_s_per_device']:,.4g}",
        "draft_acceptance_rate": f"{summary['draft_acceptance_rate']:,.4g}",
        "peak_memory_bytes.target": f"{500 * 2**20:,}",
        "shards": "4 of 4", "num_rows": "24", "num_error_rows": "0", "ranks of a replica": "3",
        "num_completion_tokens": f"{total.num_completion_tokens:,}",
        "exactness": "exact", "torch": "2.13.0", "temperature": "0.7",
    }  # fmt: skip
    assert {name: found[name] for name in expected} == {name: [value] for name, value in expected.items()}
    # What says nothing of this run is left out.
    assert not {"price of a million tokens", "peak_memory_bytes.draft", "deepspeed", "stop"} & found.keys()


def test_a_lossy_run_says_so_first(pages: dict[str, Path]) -> None:
    text = read(pages["lossy"])
    assert text.index("is NOT exact") < text.index("<main>") and 'class="banner lossy"' in text
    assert (
        lines(text)["exactness"] == ["NOT exact"] and "committed unverified" in sections(text)["acceptance"]
    )
    assert "is NOT exact" not in read(pages["plain"])
    assert "lossy is NOT exact" in read(pages["several"])


def test_an_unfinished_run_says_how_far_it_is(pages: dict[str, Path]) -> None:
    text = " ".join(html.unescape(re.sub("<[^>]+>", "", read(pages["unfinished"]))).split())
    assert "is not finished. 2 of 4 shards and 12 of 24 rows are done" in text
    assert 'class="banner unfinished"' not in read(pages["plain"])


def test_what_a_run_does_not_have_is_left_out_with_a_reason(pages: dict[str, Path]) -> None:
    assert "--draft" in sections(read(pages["alone"]))["block-lengths"]
    several = sections(read(pages["several"]))
    assert "alone: it gen" in several["acceptance"]
    assert "failed: nothing was generated" in several["speed-over-time"]
    assert "failed: no row has a completion" in several["completion-lengths"]


def test_errors_are_counted_and_nothing_in_them_is_markup(pages: dict[str, Path]) -> None:
    errors = sections(read(pages["lossy"]))["errors"]
    assert "<b>9000" not in errors and "<script" not in errors
    # Eight rows, which differ in numbers alone, are one kind.
    assert "<td>the prompt has &lt;b&gt;N&lt;/b&gt; tokens</td><td>8</td>" in errors
    assert "every row has a completion" in sections(read(pages["plain"]))["errors"]


def test_runs_are_compared_by_what_differs(pages: dict[str, Path]) -> None:
    text = read(pages["several"])
    found = lines(text)
    assert found["num_draft_tokens"] == ["4", "7", "8", "4", "4", "4"] and "max_new_tokens" not in found
    assert re.findall(r'<th scope="col">(\w+)</th>', sections(text)["numbers"]) == [
        "plain", "longer", "lossy", "unfinished", "alone", "failed",
    ]  # fmt: skip


def test_the_command_writes_beside_the_run_and_refuses_others(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = shutil.copytree(runs["alone"], tmp_path / "run")
    assert report([str(output)]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert Path(document["page"]) == output / "report" / "report.html"
    assert document["num_bytes"] == Path(document["page"]).stat().st_size
    assert all(Path(path).read_bytes().startswith(b"\x89PNG") for path in document["pictures"])
    assert report([str(tmp_path)]) == 2 and "is not the folder of a run" in capsys.readouterr().err


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
