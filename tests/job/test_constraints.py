"""Constraints through the whole job: options and columns, refusals, and what becomes of a bad row."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.job.launching import read_output, refused, run_here, shard_stats
from tests.job.pair import some_texts, write_arrow

SCHEMA = {
    "type": "object",
    "properties": {
        "sea": {"enum": ["north", "south"]},
        "depth": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["sea", "depth"],
    "additionalProperties": False,
}
# Of a grammar's own schemas the numbers are not seen before llguidance overflows its stack.
LEAST = '{"type": "integer", "minimum": -9223372036854775808, "maximum": -9223372036854775807}'
CRASH = json.dumps({"grammar": f"start: %json {LEAST}"})


@pytest.fixture
def sampled(options: dict[str, Any]) -> dict[str, Any]:
    return options | {"temperature": 1.0, "model_impl": "transformers", "max_new_tokens": 60}


def test_a_schema_for_all_rows(sampled: dict[str, Any], tmp_path: Path) -> None:
    """Greedy too, and the same rows without a draft."""
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA), encoding="utf-8")
    changes = sampled | {"json_schema": schema, "temperature": 0}
    assert run_here(**changes, output=tmp_path / "run").code == 0
    rows = read_output(tmp_path / "run").to_pylist()
    for row in rows:
        assert row["finish_reason"] == "stop"
        found = json.loads(row["completion"])
        assert found["sea"] in ("north", "south") and 0 <= found["depth"] <= 99
    assert sum(stats["num_forced_draft_tokens"] for stats in shard_stats(tmp_path / "run")) > 24
    alone = changes | {"draft": None}
    assert run_here(**alone, output=tmp_path / "alone").code == 0
    again = read_output(tmp_path / "alone").to_pylist()
    assert [row["completion"] for row in again] == [row["completion"] for row in rows]
    # The constraint is part of what a run is.
    schema.write_text(json.dumps({**SCHEMA, "required": ["sea"]}), encoding="utf-8")
    refused(run_here(**changes, output=tmp_path / "run"), "constraint")


def test_every_row_its_own_and_a_bad_one_is_an_error_row(sampled: dict[str, Any], tmp_path: Path) -> None:
    column = [
        '{"regex": "[0-9]{3}-[a-c]+!"}',
        None,
        '{"choices": ["one", "two or three"]}',
        '{"regex": "(unclosed"}',
        json.dumps({"json_schema": SCHEMA}),
        '{"grammar": "start: \\"x\\" \\"y\\"~2..3"}',
        "no JSON",
        '{"json_schema": true}',
        '{"json_schema": false}',
        json.dumps({"choices": [f"option {i}" for i in range(3000)]}),
        '{"json_schema": {"const": 9007199254740993}}',
        '{"json_schema": {"type": "integer", "minimum": -9223372036854775808, "maximum": 9}}',
        CRASH,
    ]
    prompts = write_arrow(tmp_path / "own.arrow", {"prompt": some_texts(13), "rule": column})
    changes = sampled | {"prompts": prompts, "constraint_column": "rule", "choices": ["of all"]}
    assert run_here(**changes, output=tmp_path / "run").code == 0
    rows = read_output(tmp_path / "run").to_pylist()
    assert [row["finish_reason"] for row in rows[:7]] == ["stop"] * 3 + ["error"] + ["stop"] * 2 + ["error"]
    texts = [row["completion"] for row in rows]
    assert re.fullmatch("[0-9]{3}-[a-c]+!", texts[0])
    assert texts[1] == "of all"
    assert texts[2] in ("one", "two or three")
    assert json.loads(texts[4])["sea"] in ("north", "south")
    assert texts[5] in ("xyy", "xyyy")
    assert rows[3]["error"].startswith("rule cannot be used: ") and "unclosed group" in rows[3]["error"]
    assert rows[6]["error"].startswith("rule cannot be used: it is not a JSON object")
    assert rows[7]["finish_reason"] in ("stop", "length")
    assert rows[8]["error"] == "rule cannot be used: the schema is false, which nothing matches"
    assert texts[9].startswith("option ") and rows[9]["finish_reason"] == "stop"
    assert "at /: const 9007199254740993 would become another number" in rows[10]["error"]
    assert rows[11]["error"] is None and -(2**63) <= int(texts[11]) <= 9
    assert "llguidance cannot compile it: its process ended with SIGSEGV" in rows[12]["error"]


@pytest.mark.usefixtures("no_models")
def test_what_cannot_be_used_is_refused_before_any_model_is_loaded(
    options: dict[str, Any], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps({**SCHEMA, "properties": {"sea": {"type": "waves"}}}), encoding="utf-8")
    new = options | {"output": tmp_path / "run"}
    refused(run_here(**new, json_schema=bad), f"--json_schema {bad}", "Invalid type: waves")
    refused(run_here(**new, constraint_column="rules"), "--constraint_column rules is not a column")


def test_a_budget_of_thinking(sampled: dict[str, Any], tmp_path: Path) -> None:
    """Whatever the model writes, after so many tokens comes the end, then the answer."""
    changes = sampled | {"max_thinking_tokens": 5, "end_of_thinking": " so", "choices": ["yes", "no"]}
    assert run_here(**changes, output=tmp_path / "run").code == 0
    rows = read_output(tmp_path / "run").to_pylist()
    for row in rows:
        thinking, end, answer = row["completion"].rpartition(" so")
        assert end and answer in ("yes", "no") and row["finish_reason"] == "stop"
        assert thinking
        # In columns of their own, too; newlines around them are left out.
        assert row["completion_answer"] == answer and row["completion_thinking"] == thinking.strip("\n")
