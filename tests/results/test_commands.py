"""What a person sees of a run: how it went and some completions, on one screen."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdist.cli import show as main
from tests.finished_runs import write_run
from tests.results.evaluate.files import FAILED, run_folder

WIDTH, SCREEN = 100, 40


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= WIDTH for line in text.splitlines())
    return text


def test_how_a_run_went_stands_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    text = shown(capsys, str(tmp_path / "run"))
    labels = [line.split()[0] for line in text.partition("\n\n")[0].splitlines() if line[0] != " "]
    assert labels == ["rows", "errors", "speed", "acceptance"]
    for figure in ("14 of 14, in 3", "none", "5.0 tokens/s, 1.7 per device; 30 tokens", "25.0% of the draft"):
        assert figure in text
    assert text.count("\nrow ") == 3 and "row 0, sample 0: " in text
    assert "\nrow " not in shown(capsys, str(tmp_path / "run"), "--rows", "0")


def test_long_texts_are_cut_to_a_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a prompt its end stays, of a completion its beginning; indented code stays indented."""
    prompt = "\n".join(f"line {number} " + "of a long prompt " * 9 for number in range(40))
    completion = "def f():\n    return 1\n" + "word " * 2000
    rows = [{"prompt": prompt, "completion": completion, "finish_reason": "length"}] * 5
    path = str(run_folder(tmp_path / "run", {}, rows))
    text = shown(capsys, path)
    assert len(text.splitlines()) <= SCREEN
    assert "line 39" in text and "line 1 " not in text and "more lines: --full]" in text
    assert "completion  def f():\n                return 1\n" in text
    assert "row 0: 3 tokens, cut by a length limit" in text
    assert "cut         5 of 5 completions (100%) were cut by --max_new_tokens 8" in text
    full = shown(capsys, path, "--full", "--rows", "1")
    assert "line 1 " in full and full.count("word") == 2000 and "--full" not in full


@pytest.mark.parametrize("prompt", [None, "Hi"])
def test_a_row_with_an_error_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prompt: str | None
) -> None:
    """It has no completion, and perhaps no prompt."""
    failed = {**FAILED, "prompt": prompt, "error": "prompt is null"}
    text = shown(capsys, str(run_folder(tmp_path / "run", {}, [failed, "fine"])))
    first, second = text.split("\n\n")[1:]
    assert first == "row 0: error, prompt is null" + ("" if prompt is None else "\nprompt      Hi")
    assert "completion  fine" in second and "errors      1 of 2 rows have an error" in text


def test_a_run_without_a_finished_shard_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", ())
    assert main([str(tmp_path / "run")]) == 2
    assert "has no finished shard yet: python jobs/status.py" in capsys.readouterr().err
