"""Every refusal of requests, options of rows, constraints and chats, each by files that have the fault."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import ByT5Tokenizer

from tests.data.test_refusals import BAD_JSON, request, written
from tests.job.launching import refused, run_here
from tests.job.pair import Pair, write_arrow
from tests.refusals import places, recorded

MODULES = [
    f"job/{name}.py"
    for name in (
        "run/opening",
        "texts/constraints",
        "rows/row_options",
        "rows/row_requests",
        "texts/tokens",
    )
]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


def _row(column: str, value: Any) -> bytes:
    return json.dumps({"prompt": "a", column: value}).encode() + b"\n"


# A file of prompts, options, what the message says.
ROWS: list[tuple[bytes, dict[str, Any], list[str]]] = [
    (request(body={"prompt": "a", "response_format": SCHEMA}), {"constraint_column": "rule"},
     ["--constraint_column rule is not a column of requests", "response_format", "leave it out"]),
    (request(body={"prompt": "a"}), {"rollout": "check.py:check"},
     ["--rollout check.py:check cannot judge --prompts", "give the messages in --messages_column"]),
    (_row("top_p", 2), {"row_options": ["top_p"]}, ["--row_options top_p: row 0 has 2: it must be a number"]),
    (_row("stop", [""]), {"row_options": ["stop"]},
     ["--row_options stop: row 0 has ['']", "none of them empty"]),
    (_row("options", "x"), {"row_options": ["options"]},
     ["--row_options options: row 0 has 'x'", "an object of options"]),
    (_row("options", {"top_q": 1}), {"row_options": ["options"]},
     ["--row_options options.top_q: top_q is not an option that a row can have", "top_p"]),
    (_row("stop", "x"), {"row_options": ["stop"], "regex": "a+"},
     ["row 0 has the stop string 'x' and a constraint by --regex", "leave the row's stop out"]),
    (_row("prompt", "") * 2, {}, ["no row of --prompts", "2 of 2, such as row 0: prompt is empty"]),
    (_row("prompt", "a"), {"chat_template_kwargs": '{"stile": 1}'},
     ["does not read stile", "correct the name"]),
    (_row("prompt", "a"), {"system_prompt": "b"}, ["--system_prompt has no effect on plain prompts"]),
    (b'{"chat": [{"role": "user", "content": "a"}], "tools": [{"name": "b"}]}\n', {"messages_column": "chat"},
     ["leaves out the tools, which row 0 of --prompts", "rename a column", "chat_template.jinja"]),
    (_row("prompt", "a"), {"regex": "(a"}, ["--regex (a cannot be used", "unclosed group"]),
    (_row("prompt", "a"), {"grammar": "/no/such.lark"}, ["--grammar /no/such.lark cannot be read"]),
    (_row("prompt", "a"), {"max_thinking_tokens": 5},
     ["--max_thinking_tokens needs the text that ends the thinking", "--end_of_thinking"]),
]  # fmt: skip


def _copied(pair: Pair, folder: Path, **changes: Any) -> Path:
    """The target with other values in its files of settings."""
    shutil.copytree(pair.target, folder)
    for path in folder.glob("*config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_every_refusal_of_requests_rows_and_constraints_is_true_of_a_file(
    pair: Pair, options: dict[str, Any], no_models: None, tmp_path: Path
) -> None:
    """Each place in these modules that refuses a run has a run here that has the fault."""
    run = options | {"output": tmp_path / "run", "draft": None}
    with recorded() as made:
        for number, (content, changes, words) in enumerate(ROWS):
            path = written(tmp_path / f"{number}.jsonl", content)
            refused(run_here(**run | changes | {"prompts": path}), *words)
        damaged = write_arrow(tmp_path / "damaged.arrow", {"prompt": ["a"], "options": BAD_JSON})
        refused(
            run_here(**run | {"prompts": damaged, "row_options": ["options"]}),
            "--row_options options: row 0 cannot be read (options is not valid JSON",
        )
        endless = _copied(pair, tmp_path / "endless", eos_token_id=None, eos_token=None)
        refused(
            run_here(**run | {"target": endless, "regex": "a"}),
            "--regex needs an end token", "--target", "add eos_token_id to its generation_config.json",
        )  # fmt: skip
        plain = _copied(pair, tmp_path / "plain")
        (plain / "chat_template.jinja").unlink()
        chats = write_arrow(tmp_path / "chats.arrow", {"chat": [[{"role": "user", "content": "a"}]]})
        refused(
            run_here(**run | {"target": plain, "prompts": chats, "messages_column": "chat"}),
            "--messages_column chat needs a chat template", "choose a chat model",
        )  # fmt: skip
        bad = written(tmp_path / "bad.jinja", b"{% if %}")
        refused(
            run_here(**run | {"prompts": chats, "messages_column": "chat", "chat_template": bad}),
            "--chat_template: line 1 of the file is not Jinja",
        )  # fmt: skip
        refused(run_here(**run | {"prompts": tmp_path / "run"}), "is in --output", "write to another folder")
        refused(run_here(**run | {"unfinished": True}), "--unfinished has no effect", "leave it out")
        slow = _copied(pair, tmp_path / "slow")
        for path in [*slow.glob("tokenizer*"), *slow.glob("chat_template*")]:
            path.unlink()
        ByT5Tokenizer(extra_ids=0).save_pretrained(slow)
        refused(
            run_here(**run | {"target": slow, "regex": "a"}),
            "--regex needs a fast tokenizer", "is not one", "convert the tokenizer",
        )  # fmt: skip
    missed = {place: text for place, text in places(*MODULES).items() if place not in made}
    assert not missed, missed
