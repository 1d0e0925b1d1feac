"""Conversations whose user messages are in a column: each is answered with the answers before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdist.sampling.keys import stream_key
from tests.job.launching import read_output, run_here
from tests.job.pair import write_arrow

TURNS = [
    ["of rivers and of the sea", "and where do they begin"],
    ["a list"],
    ["one", "two", "three"],
    ["kept", None],
    None,
    [],
]
ERRORS = [None, None, None, "turn 2: turns[1] is null", "turns is null", "turns is empty"]
USABLE = 3


def written(folder: Path, turns: list[Any] = TURNS) -> Path:
    return write_arrow(folder / "turns.arrow", {"turns": turns, "number": list(range(len(turns)))})


@pytest.fixture
def run(options: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    return options | {
        "prompts": written(tmp_path), "turns_column": "turns", "max_new_tokens": 12, "rows_per_shard": 2,
        "max_num_seqs": 1, "model_impl": "transformers",
    }  # fmt: skip


def test_every_turn_is_the_answer_to_the_conversation_before_it(run: dict[str, Any], tmp_path: Path) -> None:
    """As runs over the chats give it, turn by turn."""
    assert run_here(**run, output=tmp_path / "run").code == 0
    rows = read_output(tmp_path / "run").to_pylist()
    assert [row["error"] for row in rows] == ERRORS
    # The turns before one that cannot be used are kept.
    assert [len(row["turn_completions"] or []) for row in rows] == [2, 1, 3, 1, 0, 0]
    assert rows[USABLE]["finish_reason"] == "error" and rows[USABLE]["completion"] == ""
    assert [row["turns"] for row in rows] == TURNS and [row["number"] for row in rows] == list(range(6))
    sums = {name: [0] * USABLE for name in ("num_prompt_tokens", "num_completion_tokens")}
    for number in range(3):
        known = [row for row in rows[:USABLE] if len(row["turns"]) > number]
        chats = []
        for row in known:
            pairs = zip(row["turns"][:number], row["turn_completions"][:number], strict=True)
            chats.append([
                {"role": role, "content": text}
                for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)
            ] + [{"role": "user", "content": row["turns"][number]}])  # fmt: skip
        prompts = write_arrow(tmp_path / f"{number}.arrow", {"chat": chats})
        changes = {"prompts": prompts, "messages_column": "chat", "turns_column": None}
        assert run_here(**(run | changes), output=tmp_path / str(number)).code == 0
        for row, found in zip(known, read_output(tmp_path / str(number)).to_pylist(), strict=True):
            assert row["turn_completions"][number] == found["completion"]
            assert row["turn_completion_ids"][number] == found["completion_ids"]
            assert row["turn_finish_reasons"][number] == found["finish_reason"]
            for name, values in sums.items():
                values[row["row_id"]] += found[name]
            if number == len(row["turns"]) - 1:
                for name in ("prompt", "completion", "completion_ids", "finish_reason"):
                    assert row[name] == found[name]
    for name, values in sums.items():
        assert [row[name] for row in rows[:USABLE]] == values
    stats = json.loads((tmp_path / "run/stats/shard-00000.json").read_text())
    assert stats["num_completion_tokens"] == sum(sums["num_completion_tokens"][:2])
    # The first turn's prompt is still in the cache, though nothing else runs.
    assert stats["num_shared_prompt_tokens"] > 0 and stats["num_completions"] == 2


def test_a_conversation_is_generated_again_with_the_same_tokens(run: dict[str, Any], tmp_path: Path) -> None:
    """Of a shard that was lost; sampled, and with other rows beside it."""
    run |= {"temperature": 0.9, "output": tmp_path / "run"}
    assert run_here(**run).totals["num_completions"] == USABLE
    found = read_output(tmp_path / "run").to_pylist()
    assert found[2]["turn_completion_ids"][0] != found[2]["turn_completion_ids"][1]
    (tmp_path / "run/shards/shard-00001.arrow").unlink()
    assert run_here(**run).code == 0
    assert read_output(tmp_path / "run").to_pylist() == found
    assert run_here(**(run | {"output": tmp_path / "wide", "max_num_seqs": 8, "rows_per_shard": 9})).code == 0
    wide = read_output(tmp_path / "wide").to_pylist()
    for name in ("turn_completion_ids", "error", "finish_reason"):
        assert [row[name] for row in wide] == [row[name] for row in found], name


def test_turns_have_random_streams_of_their_own() -> None:
    assert stream_key(1, 2, 3, 0) == stream_key(1, 2, 3)
    assert len({stream_key(1, 2, 3, turn) for turn in range(50)}) == 50


def test_the_thinking_of_earlier_turns_is_not_repeated(run: dict[str, Any], tmp_path: Path) -> None:
    """And a conversation that grows too long is a row's error, with the turns that it has."""
    changes = {"max_thinking_tokens": 3, "end_of_thinking": " so", "choices": ["yes", "no"], "limit": 1}
    assert run_here(**(run | changes), output=tmp_path / "run").code == 0
    (row,) = read_output(tmp_path / "run").to_pylist()
    first, second = TURNS[0]  # type: ignore[misc]
    answer = row["turn_completions"][0].rpartition(" so")[2]
    assert answer in ("yes", "no")
    assert row["prompt"] == f"[user] {first}\n[assistant] {answer}\n[user] {second}\n[assistant] "
    length = len(row["turn_completion_ids"][0])
    prompts = written(tmp_path, [["one", "two " * 60]])
    changes = {"prompts": prompts, "max_seq_len": 80, "max_new_tokens": length}
    assert run_here(**(run | changes), output=tmp_path / "long").code == 0
    (row,) = read_output(tmp_path / "long").to_pylist()
    assert row["finish_reason"] == "error" and row["error"].startswith("turn 2: the prompt has ")
    assert row["completion"] == "" and len(row["turn_completions"]) == 1
