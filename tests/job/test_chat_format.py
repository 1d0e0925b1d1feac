"""``--system_prompt`` and ``--chat_template_kwargs``: what the template gets beside a row's messages."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdist.config.chat import RESERVED, ChatFormat
from specdist.job.tokens import PromptEncoder
from tests.job.launching import read_output, refused, run_here
from tests.job.pair import Pair, write_arrow

TEMPLATE = (
    "{% if style is defined %}<{{ style }}>{% endif %}"
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
)
SYSTEM = {"role": "system", "content": "own"}
USER = {"role": "user", "content": "of rivers"}


def test_the_template_gets_the_system_prompt_and_the_variables(pair: Pair) -> None:
    """A conversation with a system message keeps it; a plain prompt is left as it is."""
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    tokenizer.chat_template = TEMPLATE
    chat = ChatFormat(system_prompt="sing<|end|>", variables={"style": "low"})
    for split in (False, True):
        encoder = PromptEncoder(
            tokenizer, max_prompt_tokens=100, split_special_tokens=split, chat_format=chat
        )
        assert encoder.rendered([USER]).text == "<low>[system]sing<|end|>[user]of rivers"
        assert encoder.rendered([SYSTEM, USER]).text == "<low>[system]own[user]of rivers"
        assert encoder.rendered("plain").text == "plain"
        # A special token of a system prompt is as special as one of a message.
        assert (tokenizer.eos_token_id in encoder.prompt_ids([USER])) is not split


def test_arguments_of_the_tokenizer_are_no_variables() -> None:
    known = set(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters)
    assert known - {"self", "tools", "documents", "kwargs"} == RESERVED - {"messages"}


def test_a_run_has_them_in_its_manifest(options: dict[str, Any], tmp_path: Path) -> None:
    """Another system prompt is another run."""
    prompts = write_arrow(tmp_path / "chats.arrow", {"chat": [[USER], [SYSTEM, USER]]})
    run = options | {"prompts": prompts, "messages_column": "chat", "output": tmp_path / "run"}
    assert run_here(**run, system_prompt="sing").code == 0
    texts = ["[system] sing\n[user] of rivers\n[assistant] ", "[system] own\n[user] of rivers\n[assistant] "]
    assert read_output(tmp_path / "run")["prompt"].to_pylist() == texts
    fingerprint = json.loads((tmp_path / "run" / "manifest.json").read_text())["fingerprint"]
    assert fingerprint["system_prompt"] == "sing" and "chat_template_kwargs" not in fingerprint
    for system_prompt in ("dance", None):
        more = {} if system_prompt is None else {"system_prompt": system_prompt}
        refused(run_here(**run, **more), "system_prompt", "sing")


@pytest.mark.usefixtures("no_models")
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"system_prompt": "sing"}, ["--system_prompt has no effect on plain prompts", "--messages_column"]),
        ({"system_prompt": ""}, ["--system_prompt must not be empty"]),
        ({"chat_template_kwargs": "{"}, ["--chat_template_kwargs { is not valid JSON", "enable_thinking"]),
        ({"chat_template_kwargs": "[1]"}, ["--chat_template_kwargs [1] must be a JSON object"]),
        ({"chat_template_kwargs": '{"tokenize": true}'}, ["tokenize is not a variable"]),
        ({"chat_template_kwargs": '{"stile": 1}'}, ["does not read stile"]),
    ],
)
def test_what_has_no_effect_is_refused(
    options: dict[str, Any], tmp_path: Path, changes: dict[str, Any], told: list[str]
) -> None:
    refused(run_here(**options, **changes, output=tmp_path / "run"), *told)
