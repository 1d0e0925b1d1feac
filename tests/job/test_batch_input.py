"""A file of requests in OpenAI's batch format as the prompts of a run, and its results."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from specdist.cli import merge as merge_main
from specdist.job.rows.openai_results import _Results, _text
from specdist.job.texts.tokens import detokenizer_of
from tests.data.test_batches import TOOLS, chat, write
from tests.detokenizers import llama
from tests.job.launching import Ended, read_output, run_here
from tests.job.pair import write_arrow

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
BODIES = [
    chat(temperature=0, max_tokens=9, logprobs=True, top_logprobs=2),
    chat(temperature=1.3, seed=5, presence_penalty=0.5),
    chat(
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}, logprobs=True
    ),
    chat(temperature=0.9, top_p=0.8, stop=["e"], max_completion_tokens=20),
    chat(logit_bias={"5": 1}),
    chat(tools=TOOLS),
]
REASONS = [None, None, None, None, "body.logit_bias cannot", "the chat template does not read tools"]


@pytest.fixture(scope="module")
def answered(
    options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    """The options of a run over the requests, and its folder."""
    folder = tmp_path_factory.mktemp("batch")
    run = options | {
        "prompts": write(folder / "requests.jsonl", BODIES), "temperature": 1.0, "max_new_tokens": 24,
        "num_samples": 1, "model_impl": "transformers", "output": folder / "run",
    }  # fmt: skip
    assert run_here(**run).code == 0
    return run, folder / "run"


def test_rows_are_those_of_a_run_with_columns(answered: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    """Every option of a request reaches its row, and no other row."""
    run, output = answered
    rows = read_output(output).to_pylist()
    for row, reason in zip(rows, REASONS, strict=True):
        assert (row["error"] is None) == (reason is None) and (reason or "") in (row["error"] or "")
    assert [row["custom_id"] for row in rows] == [f"r{row}" for row in range(len(BODIES))]
    assert json.loads(rows[2]["completion"]).keys() == {"a"}
    assert len(rows[0]["top_logprobs"][0]) == 2
    columns = {
        "chat": [body["messages"] for body in BODIES[:4]],
        "temperature": [0.0, 1.3, None, 0.9], "top_p": [None, None, None, 0.8],
        "seed": [None, 5, None, None], "max_new_tokens": [9, None, None, 20],
        "presence_penalty": [None, 0.5, None, None], "stop": [None, None, None, ["e"]],
        "rule": [None, None, json.dumps({"json_schema": SCHEMA}), None],
    }  # fmt: skip
    names = [name for name in columns if name not in ("chat", "rule")]
    changes = {
        "prompts": write_arrow(tmp_path / "rows.arrow", columns), "messages_column": "chat", "logprobs": 2,
        "row_options": names, "constraint_column": "rule", "output": tmp_path / "run",
    }  # fmt: skip
    assert run_here(**(run | changes)).code == 0
    expected = read_output(tmp_path / "run").to_pylist()
    for name in ("prompt", "completion_ids", "finish_reason", "top_logprob_ids"):
        assert [row[name] for row in rows[:4]] == [row[name] for row in expected], name


def test_the_same_command_resumes(answered: tuple[dict[str, Any], Path]) -> None:
    """Also with the options that the run has written down."""
    run, output = answered
    for more in ({}, {"config": output / "config.yaml"}):
        ended: Ended = run_here(**(run | more))
        assert ended.code == 0 and "nothing to do" in ended.stderr


def test_results_are_those_of_the_api(answered: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    """One line per request, with the tokens of its row, and log-probabilities only where asked for."""
    folder = answered[1]
    path = tmp_path / "results.jsonl"
    assert run_merge(folder, path) == (0, f"6 results in {path}\n")
    results = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = read_output(folder).to_pylist()
    assert len({result["id"] for result in results}) == len(rows)
    for result, row, reason in zip(results, rows, REASONS, strict=True):
        assert result["custom_id"] == row["custom_id"]
        assert result["response"]["status_code"] == (200 if reason is None else 400)
        body = result["response"]["body"]
        if reason is not None:
            assert reason in result["error"]["message"] == body["error"]["message"]
            continue
        assert result["error"] is None and body["object"] == "chat.completion"
        (choice,) = body["choices"]
        assert choice["message"] == {"role": "assistant", "content": row["completion"]}
        assert choice["finish_reason"] == row["finish_reason"]
        assert (choice["logprobs"] is None) == (row["row_id"] not in (0, 2))
        numbers = row["num_prompt_tokens"], row["num_completion_tokens"]
        assert body["usage"] == dict(
            zip(("prompt_tokens", "completion_tokens", "total_tokens"), (*numbers, sum(numbers)), strict=True)
        )
    content = results[0]["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert "".join(item["token"] for item in content) == rows[0]["completion"]
    assert len(content) == len(rows[0]["completion_ids"])
    for item, logprob in zip(content, rows[0]["logprobs"], strict=True):
        # Greedy: the likeliest is the one that was taken.
        assert item["logprob"] == logprob == item["top_logprobs"][0]["logprob"]
        assert item["token"] == item["top_logprobs"][0]["token"] and len(item["top_logprobs"]) == 2
        assert item["bytes"] in (None, list(item["token"].encode()))
    content = results[2]["response"]["body"]["choices"][0]["logprobs"]["content"]
    # Without the end token.
    assert rows[2]["finish_reason"] == "stop"
    assert "".join(item["token"] for item in content) == rows[2]["completion"]
    assert all(item["top_logprobs"] == [] for item in content)


def test_completions_have_results_of_several_samples(
    options: dict[str, Any], greedy: tuple[Path, Ended], tmp_path: Path
) -> None:
    """Those of the legacy endpoint; a run over other prompts is refused."""
    bodies = [
        {"prompt": "the river", "n": 2, "logprobs": 1},
        {"prompt": "the sea", "n": 1, "seed": 4},
        {"prompt": "the sky", "logprobs": 2},
    ]
    run = options | {
        "prompts": write(tmp_path / "a.jsonl", bodies, url="/v1/completions"), "num_samples": 2,
        "temperature": 1.0, "max_new_tokens": 6, "output": tmp_path / "run",
    }  # fmt: skip
    assert run_here(**run).code == 0
    path = tmp_path / "results.jsonl"
    assert run_merge(tmp_path / "run", path)[0] == 0
    rows = read_output(tmp_path / "run").to_pylist()
    results = [json.loads(line)["response"]["body"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert [[choice["text"] for choice in body["choices"]] for body in results] == [
        [row["completion"] for row in rows[:2]], [row["completion"] for row in rows[2:3]],
        [row["completion"] for row in rows[3:]],
    ]  # fmt: skip
    assert [choice["index"] for choice in results[0]["choices"]] == [0, 1]
    assert results[0]["usage"]["completion_tokens"] == sum(row["num_completion_tokens"] for row in rows[:2])
    first = results[0]["choices"][0]["logprobs"]
    assert len(first["tokens"]) == len(first["token_logprobs"]) == len(first["top_logprobs"])
    for begin, token in zip(first["text_offset"], first["tokens"], strict=True):
        assert "\ufffd" in token or rows[0]["completion"][begin:].startswith(token)
    assert results[1]["choices"][0]["logprobs"] is None
    for told, folder, name in (
        ("needs a run over requests of OpenAI's batch format", greedy[0], "new.jsonl"),
        ("must end in .jsonl", tmp_path / "run", "new.csv"),
        ("exists: give another name", tmp_path / "run", "results.jsonl"),
    ):
        code, message = run_merge(folder, tmp_path / name)
        assert code == 2 and told in message
    assert not (tmp_path / "new.jsonl").exists()


def run_merge(folder: Path, output: Path) -> tuple[int, str]:
    """The exit code and what is printed."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        code = merge_main([str(folder), "--output", str(output), "--format", "openai"])
    return code, text.getvalue()


def test_the_texts_of_tokens_are_together_the_completion() -> None:
    """With the space before its first word, whole characters, and nothing of the stop string."""
    tokenizer = llama()
    results = object.__new__(_Results)
    results.__dict__ |= {"_tokenizer": tokenizer, "_detokenizer": detokenizer_of(tokenizer)}
    names = ["▁sky", *(f"<0x{byte:02X}>" for byte in "你".encode()), "<|mark|>", "END", "</s>"]
    ids = tokenizer.convert_tokens_to_ids(names)
    others = tokenizer.convert_tokens_to_ids(["▁the", "<0xE4>", "</s>"])
    row = {
        "prompt": "the", "completion": " sky你E", "finish_reason": "stop", "completion_ids": ids,
        "logprobs": [-1.0] * len(ids), "top_logprob_ids": [[token_id, *others] for token_id in ids],
        "top_logprobs": [[-1.0, -2.0, -3.0, -4.0]] * len(ids),
    }  # fmt: skip
    found = results._logprobs(row, 4, is_chat=False)
    assert found["tokens"] == [" sky", "", "", "你", "<|mark|>", "E"]
    assert found["text_offset"] == [0, 4, 4, 4, 5, 5]
    assert list(found["top_logprobs"][0]) == [" sky", " the", "", "</s>"]
    assert next(iter(found["top_logprobs"][3])) == "你"
    content = results._logprobs(row, 4, is_chat=True)["content"]
    assert bytes(byte for item in content for byte in item["bytes"] or ()).decode() == row["completion"]


def test_thinking_is_the_reasoning_content_of_a_result() -> None:
    row = {"completion": "<t>a</t>b", "completion_answer": "b", "completion_thinking": "a"}
    assert _text(row, is_chat=True)["message"] == {
        "role": "assistant", "content": "b", "reasoning_content": "a"
    }  # fmt: skip
    assert _text(row, is_chat=False) == {"text": row["completion"]}
