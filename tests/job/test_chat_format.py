"""``--system_prompt`` and ``--chat_template_kwargs``: what the template gets beside a row's messages."""

from __future__ import annotations

import inspect
import json
import shutil
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdist.config.prompts import RESERVED, ChatFormat
from specdist.data.formats.batches import Chat
from specdist.data.formats.prompts import RowError
from specdist.job.texts.tokens import PromptEncoder
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
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=100, chat_format=chat)
    assert encoder.rendered([USER]).text == "<low>[system]sing<|end|>[user]of rivers"
    assert encoder.rendered([SYSTEM, USER]).text == "<low>[system]own[user]of rivers"
    assert encoder.rendered("plain").text == "plain"
    # A special token of a system prompt is as special as one of a message.
    assert tokenizer.eos_token_id in encoder.prompt_ids([USER])


def test_a_file_is_used_in_place_of_the_tokenizer_s_template(pair: Pair, tmp_path: Path) -> None:
    """Tokens are those of a tokenizer that has the same text; another text is another run."""
    target = shutil.copytree(pair.target, tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(target)
    file = tmp_path / "mended.jinja"
    file.write_text(f"{TEMPLATE}{{# mended #}} ")
    chats = write_arrow(tmp_path / "chats.arrow", {"chat": [[USER], [SYSTEM, USER]]})
    job = pair.job(prompts=chats, messages_column="chat", max_new_tokens=4, temperature=0, draft=None)
    assert run_here(**job, chat_template=file, output=tmp_path / "file").code == 0
    tokenizer.chat_template = file.read_text()
    tokenizer.save_pretrained(target)
    assert run_here(**job | {"target": target}, output=tmp_path / "own").code == 0
    rows, own = (read_output(tmp_path / name) for name in ("file", "own"))
    assert rows["completion_ids"] == own["completion_ids"] and rows["prompt"] == own["prompt"]
    assert "| chat_template | `mended.jinja` |" in (tmp_path / "file" / "README.md").read_text()
    file.write_text("a\n{% if %}")
    job |= {"output": tmp_path / "file"}
    refused(run_here(**job, chat_template=file), "--chat_template: line 2 of the file is not Jinja")
    file.write_text("{{ messages[0].content }}")
    refused(run_here(**job, chat_template=file), "different settings", "chat_template:")
    refused(run_here(**job, chat_template="gone"), "--chat_template gone: name a file of text")


MOMENT = datetime(2026, 2, 3, 4, 5, 6)
FORMATS = ["%d %b %Y", "%-d %B %y, %H:%M:%S", "%A%%d %j%%", "no date", "%Y-%m-%dT%X", "100%", "%e|%_d|%I %p"]


def test_a_template_that_asks_for_the_date_is_told_that_of_the_format(pair: Pair) -> None:
    """In every form, as ``strftime`` has it, without a change to the rest of the text; in named templates
    too."""
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    asked = "".join(f"[{{{{ strftime_now({text!r}) }}}}]" for text in FORMATS)
    told = "".join(f"[{MOMENT.strftime(text)}]" for text in FORMATS)
    rest = "{% macro of(m) %}{{ m.content }} {{ strftime_now(format='%Y')|int + 1 }}{% endmacro %}"
    tokenizer.chat_template = asked + rest + "{{ of(messages[0]) }}"
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=100, chat_format=ChatFormat(now=MOMENT))
    assert encoder.rendered([USER]).text == f"{told}of rivers 2027"
    asked += "{{ messages[0].content }}"
    tokenizer.chat_template = {"default": asked, "tool_use": "{{ tools[0].name }} " + asked}
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=100, chat_format=ChatFormat(now=MOMENT))
    assert encoder.rendered(Chat([USER], {"tools": [{"name": "add"}]})).text == f"add {told}of rivers"


def test_a_run_has_the_date_of_its_first_start(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every later one, also in another time zone; and a run of a version that did not keep it that of its
    manifest."""
    target = Path(shutil.copytree(options["target"], tmp_path / "target"))
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d %H') }} {{ messages[0].content }}"
    tokenizer.save_pretrained(target)
    prompts = write_arrow(tmp_path / "chats.arrow", {"chat": [[USER]] * 4})
    run = options | {"prompts": prompts, "messages_column": "chat", "output": tmp_path / "run",
                     "target": target, "rows_per_shard": 2}  # fmt: skip

    def started(zone: str) -> list[str]:
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert run_here(**run).code == 0
        texts = read_output(tmp_path / "run")["prompt"].to_pylist()
        for path in (tmp_path / "run" / "shards").glob("shard-00001.*"):
            path.unlink()
        return texts

    try:
        first = started("UTC-14")
        path = tmp_path / "run" / "manifest.json"
        manifest = json.loads(path.read_text())
        moment = datetime.fromisoformat(manifest["info"]["clock"])
        assert moment.utcoffset() == timedelta(hours=14)
        assert first == [f"{moment:%Y-%m-%d %H} of rivers"] * 4
        assert started("UTC+11") == first
    finally:
        monkeypatch.undo()
        time.tzset()


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
        ({"chat_template_kwargs": "{"}, ["--chat_template_kwargs { is not valid JSON", "enable_thinking"]),
        ({"chat_template_kwargs": '{"tokenize": true}'}, ["tokenize is not a variable"]),
    ],
)
def test_what_has_no_effect_is_refused(
    options: dict[str, Any], tmp_path: Path, changes: dict[str, Any], told: list[str]
) -> None:
    refused(run_here(**options, **changes, output=tmp_path / "run"), *told)


REFUSING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
)


def refusing_target(options: dict[str, Any], folder: Path) -> Path:
    """A target whose template has no system role, as that of Gemma 2."""
    target = Path(shutil.copytree(options["target"], folder / "target"))
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = REFUSING + TEMPLATE
    tokenizer.save_pretrained(target)
    return target


def test_a_run_without_a_usable_row_is_refused_before_anything_is_loaded(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that refuses the system prompt refuses every row; a run goes on if it takes one."""
    target = refusing_target(options, tmp_path)
    prompts = write_arrow(tmp_path / "chats.arrow", {"chat": [[USER], [USER], None]})
    run = options | {
        "prompts": prompts,
        "messages_column": "chat",
        "output": tmp_path / "run",
        "target": target,
    }
    with monkeypatch.context() as patched:
        patched.setattr("specdist.job.generate.build_replica", None)
        refused(
            run_here(**run, system_prompt="sing"),
            f"no row of --prompts {prompts} can be used (2 of 3, such as row 0: the chat template rejects "
            "the messages: System role not supported; 1 of 3, such as row 2: chat is null)",
        )
        refused(
            run_here(**run | {"max_seq_len": 2}), "2 of 3, such as row 0: the prompt has ", "--max_seq_len 2"
        )
    assert not (tmp_path / "run").exists()
    ended = run_here(**run)
    assert ended.code == 0 and "1 of 3 rows have an error instead of a completion" in ended.stderr


def test_a_run_whose_rows_all_became_errors_ends_with_2(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one reason, which is known only later, such as rows that are too large for the device."""
    run = options | {"output": tmp_path / "run", "limit": 3}
    with monkeypatch.context() as patched:
        patched.setattr("specdist.job.run.preflight.check_any_usable", lambda *_: None)
        patched.setattr("specdist.job.texts.tokens.PromptEncoder.token_ids", unusable)
        for _ in range(2):  # also when nothing is left to do
            ended = run_here(**run)
            assert ended.code == 2 and "no row has a completion: of 3 errors 3 are: too large" in ended.stderr
    assert read_output(tmp_path / "run")["finish_reason"].to_pylist() == ["error"] * 3


def unusable(encoder: PromptEncoder, prompt: Any) -> list[int]:
    raise RowError("too large")
