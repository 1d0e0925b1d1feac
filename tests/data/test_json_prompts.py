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
GOOD = [{"role": "user", "content": "hello"}]
WRONG_CHATS: list[tuple[Any, str]] = [
    ("hello", "chat is text ('hello'), not a list of chat messages"),
    ({"role": "user"}, "chat is an object ({'role': 'user'}), not a list of chat messages"),
    ([*GOOD, "x"], "chat[1] is text ('x'), not a message"),
    ([{"role": "user", "content": {"text": "x"}}], "chat[0].content is an object ("),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
     "chat[0].content[0] is a part that is not text (type image_url)"),
    ([{"role": 1, "content": "x"}], "chat[0].role is a number (1), not text"),
    (None, "chat is null"),
    ([None], "chat[0] is null"),
    ([{"role": "user"}], "chat[0] has no content"),
    ([{"content": "x"}], "chat[0] has no role"),
]  # fmt: skip


def opened(path: Path, values: list[Any], *, column: str = "prompt", is_chat: bool = False) -> Prompts:
    path.write_text("".join(json.dumps({column: value, "n": n}) + "\n" for n, value in enumerate(values)))
    return open_prompts(
        str(path),
        prompt_column=None if is_chat else column,
        messages_column=column if is_chat else None,
        limit=None,
    )


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


@pytest.mark.parametrize("chunk_bytes", [1, 2**24])
def test_messages_of_a_wrong_form_cost_their_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(jsonl_module, "CHUNK_BYTES", chunk_bytes)
    values = [value for value, _ in WRONG_CHATS]
    prompts = opened(tmp_path / "a.jsonl", [*values, GOOD, *values], column="chat", is_chat=True)
    assert prompts.prompt(len(values)) == GOOD
    for start in (0, len(values) + 1):
        for row, (_, told) in enumerate(WRONG_CHATS, start):
            assert told in reason(prompts, row)
