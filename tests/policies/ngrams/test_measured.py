"""The measurement of sources goes on where it was interrupted; the runs themselves are stood in for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.policies.ngrams import measured

NS_PER_S = 10**9


class Machine:
    """Stands in for the job: every run takes a second longer than the one before."""

    def __init__(self, last: int | None = None, num_row_steps: int = 6) -> None:
        self.runs: list[Sequence[str]] = []
        self._last, self._num_row_steps = last, num_row_steps

    def __call__(self, words: Sequence[str]) -> None:
        if len(self.runs) == self._last:
            raise KeyboardInterrupt
        self.runs.append(words)
        stats = Path(words[words.index("--output") + 1]) / "stats"
        stats.mkdir(parents=True, exist_ok=True)
        counts = dict.fromkeys(measured.COUNTS, 12) | {"num_row_steps": self._num_row_steps}
        for shard, share in enumerate((0.25, 0.75)):
            seconds = {"wall_ns": int(share * len(self.runs) * NS_PER_S)}
            (stats / f"{shard}.json").write_text(json.dumps(counts | seconds))


def sources(machine: Machine) -> list[str]:
    return [run[run.index("--draft") + 1] for run in machine.runs]


def test_sources_take_turns_and_an_interrupted_measurement_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "TEMPERATURES", (0.0,))
    output = tmp_path / "result.json"
    words = ["--target", "large", "--draft", "small", "--prompts", "a.jsonl:2", "a.jsonl+"]
    words += ["--repeats", "2", "--output", str(output)]
    first, second, third = Machine(last=3), Machine(), Machine()
    monkeypatch.setattr(measured, "generated", first)
    with pytest.raises(KeyboardInterrupt):
        measured.main(words)
    monkeypatch.setattr(measured, "generated", second)
    measured.main(words)
    turns = ["small", "ngram"] * 2
    assert sources(first) + sources(second)[:1] == turns
    # Of the second epoch the earlier run once, when it is first needed.
    assert sources(second)[1:] == [turns[0], "small", *turns[1:]]
    runs = json.loads(output.read_text())["runs"]
    assert [run["wall_s"] for run in runs] == [[1, 3], [2, 1], [2, 5], [4, 6]]
    assert {run["tokens_per_pass"] for run in runs} == {0.0}
    monkeypatch.setattr(measured, "generated", third)
    measured.main(words)
    assert not third.runs and json.loads(output.read_text())["runs"] == runs
    measured.main([*words, "--limit", "9"])
    assert len(third.runs) == 9


def test_a_repeat_with_other_counts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--target", "large", "--draft", "small", "--prompts", "a.jsonl"]
    words += ["--output", str(tmp_path / "result.json")]
    monkeypatch.setattr(measured, "generated", Machine(last=3))
    with pytest.raises(KeyboardInterrupt):
        measured.main(words)
    monkeypatch.setattr(measured, "generated", Machine(num_row_steps=7))
    with pytest.raises(AssertionError):
        measured.main(words)
