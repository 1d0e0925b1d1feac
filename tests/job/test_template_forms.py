"""What a chat template gets of messages and tools, in the form that it shows; and what it leaves out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from specdist.config.prompts import ChatFormat
from specdist.data.formats.batches import Chat
from specdist.data.formats.messages import chat_messages
from specdist.data.formats.prompts import RowError, open_prompts
from specdist.job.rows.row_requests import chat_warnings
from specdist.job.texts.tokens import PromptEncoder
from tests.data.test_batches import TOOLS, write
from tests.job.launching import parse, read_output, refused, run_here
from tests.job.pair import Pair

USER, ANSWER = {"role": "user", "content": "of rivers"}, {"role": "assistant", "content": "the sky"}
PART = {"type": "text", "text": "of rivers"}
EACH = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}(ARGUMENTS){% endfor %}"
BODY = "{% for m in messages %}[{{ m.role }}]CONTENT{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def template(content: str = "{{ m.content }}", arguments: str = "{{ c.function.arguments | tojson }}") -> str:
    return BODY.replace("CONTENT", content + CALLS.replace("ARGUMENTS", arguments))


@pytest.fixture
def tokenizer(pair: Pair) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(pair.target)


def encoder(tokenizer: PreTrainedTokenizerBase, chat_template: str, **chat: Any) -> PromptEncoder:
    tokenizer.chat_template = chat_template
    return PromptEncoder(tokenizer, max_prompt_tokens=100, chat_format=ChatFormat(**chat))


@pytest.mark.parametrize(
    ("content", "of_several"),
    [
        (EACH, "of riversand"), ("{{ m.content }}", "of rivers\nand"),
        ("{{ m.content[0].text }}", "of rivers\nand"),
        ("{% if m.content is string %}{{ m.content }}{% endif %}", "of rivers\nand"),
        (f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{EACH}{{% endif %}}", "of riversand"),
    ],
)  # fmt: skip
def test_content_has_the_form_that_the_template_shows(
    tokenizer: PreTrainedTokenizerBase, content: str, of_several: str
) -> None:
    """Whether it is a text or a list: a loop over letters, or Python's notation, would lose or change it."""
    found = encoder(tokenizer, template(content))
    for given in ("of rivers", [PART], ["of rivers"], [{"text": "of rivers", "image": None}]):
        messages = chat_messages("m", [{"role": "user", "content": given}, ANSWER, USER])
        assert found.rendered(messages).text == "[user]of rivers[assistant]the sky[user]of rivers>"
    (message,) = chat_messages("m", [{"role": "user", "content": [PART, "and"]}])
    assert found.rendered([message]).text == f"[user]{of_several}>"
    if of_several == "of riversand":
        assert tokenizer.apply_chat_template([message], tokenize=False) == f"[user]{of_several}"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("{{ c.function.arguments | tojson }}", '{"a": "b"}'), ("{{ c.function.arguments }}", '{"a": "b"}'),
        ("{{ '' + c.function.arguments }}", '{"a": "b"}'),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "a=b"),
    ],
)  # fmt: skip
def test_arguments_have_the_form_that_the_template_shows(
    tokenizer: PreTrainedTokenizerBase, arguments: str, shown: str
) -> None:
    """Neither an error, nor Python's notation, nor JSON within JSON."""
    found = encoder(tokenizer, template(arguments=arguments))
    for given in ({"a": "b"}, '{"a": "b"}'):
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": given}}
        messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
        assert found.rendered(messages).text == f"[user]of rivers[assistant]add({shown})>"
        assert call["function"]["arguments"] == given
    call["function"]["arguments"] = "{"
    if "tojson" in arguments:
        with pytest.raises(RowError, match=r"arguments of a call of add are not JSON .* takes an object"):
            found.rendered(messages)


OWN = "{% if m.role == 'user' %}{{ m.content }}{% endif %}"


@pytest.mark.parametrize(
    ("chat_template", "left_out", "is_meant"),
    [
        (template(OWN), ["the texts of messages with the role assistant"], False),
        (template("{{ m.content | trim }}", "{{ c.x }}"), ["the arguments of calls of tools"], False),
        (BODY.replace("CONTENT", "{{ m.content.split('</think>')[-1] }}"), ["calls of tools"], False),
        ("{{ messages[0].role }}", ["the texts of messages with the role user"], False),
        ("{{ raise_exception('never') }}", [], False),
        ("{{ (messages | selectattr('role', 'equalto', 'user') | list)[-1].content }}{{ CALLS }}",
         ["the texts of messages with the role assistant", "calls of tools"], True),
    ],
)  # fmt: skip
def test_what_a_template_shows_nowhere_is_found(
    tokenizer: PreTrainedTokenizerBase, chat_template: str, left_out: list[str], is_meant: bool
) -> None:
    """What is shown in one place is not lost, nor what a template refuses; one that shows the end of a
    conversation alone does so on purpose."""
    found = encoder(tokenizer, chat_template)
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    what, meant = found.left_out([USER, ANSWER | {"tool_calls": [call]}, USER])
    assert set(left_out) <= set(what) and meant is is_meant and bool(what) is bool(left_out)
    assert found.left_out([USER])[0] == [one for one in left_out if one.endswith("role user")]
    assert found.left_out(Chat([USER], {"tools": TOOLS}))[0][:1] == (["the tools"] if left_out else [])
    if what and not is_meant:
        with pytest.raises(RowError, match=f"leaves out {what[0]}"):
            found.rendered([USER, ANSWER | {"tool_calls": [call]}, USER])


def test_the_last_message_is_continued_where_that_is_asked_for(
    options: dict[str, Any], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """By the run, or by a request, whose word comes first; otherwise a warning names the option."""
    names = ("continue_final_message", "add_generation_prompt")
    bodies = [{"messages": [USER, ANSWER], **dict(zip(names, own, strict=False))}
              for own in ((), (True, False), (False,), (True, True), (None, False))]  # fmt: skip
    prompts = open_prompts(
        str(write(tmp_path / "a.jsonl", bodies)), prompt_column="body", messages_column=None, limit=None
    )
    assert "exclude each other" in prompts.unusable[3]
    for continues in (False, True):
        found = encoder(tokenizer, template(), continues=continues)
        ends = [found.rendered(prompts.prompt(row)).text[-3:] for row in (0, 1, 2, 4)]
        assert ends == ["sky" if continues else "ky>", "sky", "ky>", "sky"]
        (told,) = chat_warnings(parse(**options, output="o"), prompts, found)
        assert told.startswith(f"{1 if continues else 2} of 5 rows") and "--continue_final_message" in told
        assert found.rendered([USER]).text.endswith("rivers>")


def test_the_tools_of_a_row_are_in_its_prompt(
    options: dict[str, Any], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """As transformers gives them, from a list or from JSON; the column is passed through. Another, which is
    not used, is named."""
    parameters = {"type": "object", "properties": {"a": {"enum": [None, 1]}}}
    own = [{"type": "function", "function": {"name": "sub", "parameters": parameters}}]
    columns = [TOOLS, json.dumps(own), None, [], "[3]", own]
    rows = [{"chat": [USER], "tools": tools, "images": []} for tools in columns]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = Path(shutil.copytree(options["target"], tmp_path / "target"))
    run = options | {"prompts": tmp_path / "a.jsonl", "messages_column": "chat", "output": tmp_path / "run",
                     "target": target, "max_new_tokens": 2}  # fmt: skip
    tokenizer.chat_template = "{{ tools | tojson if tools }}" + template()
    tokenizer.save_pretrained(target)
    ended = run_here(**run)
    assert ended.code == 0 and "those of chat: images" in ended.stderr
    found = read_output(tmp_path / "run").to_pylist()
    for row, tools in zip(found, [TOOLS, own, None, None, "error", own], strict=True):
        if tools == "error":
            assert "tools is a list ([3]), not a list of tools" in row["error"]
        else:
            assert row["prompt"] == tokenizer.apply_chat_template(
                [USER], tools=tools, tokenize=False, add_generation_prompt=True
            )
    kept = [None if row["tools"] is None else json.loads(row["tools"]) for row in found]
    assert kept == columns
    refused(run_here(**run, continue_final_message=True), "continue_final_message")
