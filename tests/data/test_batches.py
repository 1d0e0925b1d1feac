"""Requests in OpenAI's batch format: what a row asks for, and what it costs to ask for too much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdist.data.formats.batches import BODY, Chat, is_batch, read_batch
from specdist.data.formats.prompts import RowError, open_prompts

USER = {"role": "user", "content": "of rivers"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def write(path: Path, bodies: list[Any], url: str = "/v1/chat/completions", **changes: Any) -> Path:
    rows = [
        {"custom_id": f"r{row}", "method": "POST", "url": url, "body": body} | changes
        for row, body in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "any", "messages": [USER], **fields}


def test_options_and_constraints_become_columns(tmp_path: Path) -> None:
    """The body stays as it was given; null asks for nothing, and vLLM's top_k -1 for all tokens."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    bodies = [
        chat(temperature=0, max_tokens=5, seed=3, stop="x", presence_penalty=None, logit_bias={}),
        chat(top_k=-1, top_p=0.5, max_completion_tokens=7, stop=["a", "b"], n=3, frequency_penalty=1),
        chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}),
        chat(response_format={"type": "json_object"}, logprobs=True, top_logprobs=3),
        chat(response_format={"type": "text"}, logprobs=True),
    ]
    path = write(tmp_path / "a.jsonl", bodies)
    batch, table = read_batch([path])
    assert is_batch([path]) and batch.is_chat and not batch.reasons
    assert batch.num_logprobs == 3
    rows = table.to_pylist()
    assert [row["custom_id"] for row in rows] == ["r0", "r1", "r2", "r3", "r4"]
    assert [json.loads(row["body"]) for row in rows] == bodies
    own = [{k: v for k, v in (row["options"] or {}).items() if v is not None} for row in rows]
    assert own == [
        {"temperature": 0, "max_new_tokens": 5, "seed": 3, "stop": ["x"]},
        {"top_k": 0, "top_p": 0.5, "max_new_tokens": 7, "stop": ["a", "b"], "frequency_penalty": 1,
         "num_samples": 3},
        {}, {}, {},
    ]  # fmt: skip
    constraints = [row["constraint"] and json.loads(row["constraint"])["json_schema"] for row in rows]
    assert constraints == [None, None, schema, {"type": "object"}, None]


def test_chat_templates_get_tools_and_variables(tmp_path: Path) -> None:
    bodies = [chat(tools=TOOLS), chat(tools=TOOLS, tool_choice="none", chat_template_kwargs={"style": 1})]
    prompts = open_prompts(
        str(write(tmp_path / "a.jsonl", bodies)), prompt_column=BODY, messages_column=None, limit=None
    )
    first, second = prompts.prompt(0), prompts.prompt(1)
    assert isinstance(first, Chat) and isinstance(second, Chat)
    assert first.variables == {"tools": TOOLS} and second.variables == {"style": 1}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            chat(logit_bias={"5": 1}),
            "body.logit_bias cannot be a row's own: the same for all rows is",
        ),
        (chat(stream=True), "body.stream"),
        (chat(temperature=-1), "body.temperature is -1, but it must be a number, and must be 0"),
        (chat(echo=True), "body.echo cannot be a row's own: leave it out"),
        (chat(max_tokens=10**30), "body.max_tokens is 1000"),
        (chat(stop="x", response_format={"type": "json_object"}), "exclude each other"),
        (chat(response_format={"type": "json_schema"}), "body.response_format"),
        (chat(tool_choice="required", tools=TOOLS), "body.tool_choice 'required' cannot be forced"),
        (chat(messages=[]), "body.messages must be a list"),
        (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "a part that is not text"),
        ({"prompt": "x"}, "body.messages must be a list"),
    ],
)
def test_what_cannot_be_honoured_is_the_rows_error(tmp_path: Path, body: Any, told: str) -> None:
    """And the rows beside it are not concerned."""
    path = write(tmp_path / "a.jsonl", [chat(), body, chat()])
    prompts = open_prompts(str(path), prompt_column=BODY, messages_column=None, limit=None)
    with pytest.raises(RowError) as raised:
        prompts.prompt(1)
    assert told in raised.value.reason
    assert prompts.prompt(0) == prompts.prompt(2) == Chat([USER])


def test_completions_have_plain_prompts(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", [{"prompt": "x", "logprobs": 2}, {"prompt": ["y"]}, {"prompt": [1, 2]}],
        url="/v1/completions",
    )  # fmt: skip
    assert read_batch([path])[0].num_logprobs == 2
    prompts = open_prompts(str(path), prompt_column=BODY, messages_column=None, limit=None)
    assert [prompts.prompt(0), prompts.prompt(1), prompts.is_chat] == ["x", "y", False]
    assert "body.prompt must be one text" in prompts.unusable[2]
