"""A file of requests in OpenAI's batch format as the prompts of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.test_batches import TOOLS, chat, write
from tests.job.launching import Ended, read_output, refused, run_here
from tests.job.pair import write_arrow
from tests.job.ranks import fork_ranks

pytestmark = pytest.mark.ranks

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
BODIES = [
    chat(temperature=0, max_tokens=9, logprobs=True, top_logprobs=2),
    chat(temperature=1.3, seed=5, presence_penalty=0.5),
    chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}),
    chat(temperature=0.9, top_p=0.8, stop=["e"], max_completion_tokens=20),
    chat(logit_bias={"5": 1}),
    chat(tools=TOOLS),
]
REASONS = [None, None, None, None, "body.logit_bias cannot", "the chat template does not read tools"]


@pytest.fixture(scope="module")
def answered(
    options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    """The options of a run over the requests, and its folder. Its draft has a rank of its own."""
    folder = tmp_path_factory.mktemp("batch")
    run = options | {
        "prompts": write(folder / "requests.jsonl", BODIES), "temperature": 1.0, "max_new_tokens": 24,
        "num_samples": 1, "model_impl": "transformers", "output": folder / "run",
    }  # fmt: skip
    assert fork_ranks(2, **run).code == 0
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
        ended: Ended = fork_ranks(2, **(run | more))
        assert ended.code == 0 and "nothing to do" in ended.stderr


@pytest.mark.usefixtures("no_models")
def test_what_holds_for_all_rows_is_refused_before_a_model_is_loaded(
    options: dict[str, Any], tmp_path: Path
) -> None:
    run = options | {
        "prompts": write(tmp_path / "a.jsonl", [chat(n=2), chat(n=2)]),
        "output": tmp_path / "run",
    }
    refused(run_here(**run), "--num_samples 1", "have n 2: give --num_samples 2")
    write(tmp_path / "a.jsonl", [chat(), chat(n=2)])
    refused(run_here(**run), "line 2 has n 2")
    write(tmp_path / "a.jsonl", [chat(response_format={"type": "json_object"})])
    refused(run_here(**run, constraint_column="rule"), "--constraint_column rule is not a column of requests")
    write(tmp_path / "a.jsonl", [{"prompt": "x"}], url="/v1/completions")
    refused(run_here(**run, system_prompt="sing"), "--system_prompt has no effect on plain prompts")
