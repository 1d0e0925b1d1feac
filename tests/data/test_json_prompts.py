"""A prompt of a wrong type in a JSONL file costs its row alone; a column of such values is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdist.data.formats import jsonl as jsonl_module
from specdist.data.formats.prompts import Prompts, RowError, open_prompts

WRONG = [5, 1.5, True, False, ["a", 1], [], {"text": "a"}, 10**18, float("nan")]
WRONG_TOLD = ["a number (5)", "a number (1.5)", "a boolean (True)", "a boolean (False)", "a list (['a', 1])",
              "a list ([])", "an object ({'text': 'a'})", "a number (1000000000000000000)",
              "a number (nan)"]  # fmt: skip


def opened(path: Path, values: list[Any]) -> Prompts:
    path.write_text("".join(json.dumps({"prompt": value, "n": n}) + "\n" for n, value in enumerate(values)))
    return open_prompts(str(path), prompt_column="prompt", messages_column=None, limit=None)


def reason(prompts: Prompts, row: int) -> str:
    with pytest.raises(RowError) as raised:
        prompts.prompt(row)
    return raised.value.reason


@pytest.mark.parametrize("chunk_bytes", [1, 2**24])
def test_a_prompt_that_is_not_text_costs_its_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    """Wherever it is, also before every text and in a chunk of its own."""
    monkeypatch.setattr(jsonl_module, "CHUNK_BYTES", chunk_bytes)
    prompts = opened(tmp_path / "a.jsonl", [*WRONG, "one", None, *WRONG, "two"])
    for start in (0, len(WRONG) + 2):
        for row, told in enumerate(WRONG_TOLD, start):
            assert reason(prompts, row) == f"prompt is {told}, not text"
    assert prompts.prompt(len(WRONG)) == "one" and prompts.prompt(prompts.num_rows - 1) == "two"
    assert reason(prompts, len(WRONG) + 1) == "prompt is null"
    rows = prompts.table(0, prompts.num_rows).to_pylist()
    assert [row["n"] for row in rows] == list(range(prompts.num_rows))
    assert rows[0]["prompt"] is None
