"""What a chat template shows of a conversation, and in which form: found out by rendering small ones.

Some templates take a message's content as one text and others as a list of parts; some take the arguments of
a tool call as text and others as an object. Given the other form, Jinja raises, writes Python's notation, or
loops over the letters of a text and writes nothing. What a template has no place for (a role, tools, calls)
is mostly left out without a word. Where a template takes both forms, messages stay as the file has them.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from typing import Any

from specdist.data.formats.prompts import RowError

Message = dict[str, Any]
Render = Callable[[list[Message]], str]

# Forms of content, and of arguments.
TEXT, PARTS, ONE_PART, OBJECT = "text", "parts", "one part", "object"
# Words that no template has: they are looked for in what it renders. ASIDE, beside a part's text, is shown
# only where the part is written out as a whole.
FIRST, SECOND, ASIDE, KEY = "vermilionquartz", "cobaltgranite", "umberbasalt", "ochrekey"
CALLED, TOOL = "tealcalled", "siennatool"
CONTENTS: dict[str, Any] = {
    TEXT: f"{FIRST} {SECOND}",
    PARTS: [{"type": "text", "text": word, ASIDE: ASIDE} for word in (FIRST, SECOND)],
    ONE_PART: [{"type": "text", "text": f"{FIRST} {SECOND}", ASIDE: ASIDE}],
}
ARGUMENTS: dict[str, Any] = {OBJECT: {KEY: FIRST}, TEXT: json.dumps({KEY: FIRST})}
# The ids of a call and its result, which templates look for; Mistral's check the length of the id.
CALL_ID, RESULT_OF = "abc456789", {"name": "add", "tool_call_id": "abc456789"}
# The message in question (x) among others: of the user (u), the assistant (a), a call (c), its result (r).
PLACES = ("x", "ux", "xu", "uax", "uxu", "xau", "ucx", "uxr", "ucxa", "uxra", "ucrx", "ucrxu")


def example_tool(like: Any) -> Message:
    """A tool with the name ``TOOL``, nested as OpenAI's if the one that is ``like`` it is."""
    parameters = {"type": "object", "properties": {"a": {"type": "number", "description": "A number."}}}
    function = {"name": TOOL, "description": "Adds.", "parameters": {**parameters, "required": ["a"]}}
    return {"type": "function", **({"function": function} if "function" in like else function)}


class TemplateForms:
    """The forms that one template shows, with its variables. ``render`` raises whatever the template does."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._content_forms = cache(self._find_content_forms)
        self._call_forms = cache(self._find_call_forms)

    @cached_property
    def shows_end_alone(self) -> bool:
        """Whether earlier messages of the user are left out as well, as by templates for single turns."""
        message = self._with_content({"role": "user", "content": FIRST})
        found = [FIRST in text for text in self._prompts(message, ("xau",))]
        return bool(found) and not any(found) and self._content_forms("user") != ()

    @cached_property
    def _shows_tools(self) -> bool:
        found = [TOOL in text for text in self._prompts({"role": "user", "content": "Add."})]
        return any(found) or not found

    def left_out(self, messages: Sequence[Message], *, has_tools: bool) -> list[str]:
        """What the template shows nowhere of that which these messages have. ``has_tools``: ``render`` gives
        the template an :func:`example_tool`."""
        found = [] if self._shows_tools or not has_tools else ["the tools"]
        for message in messages:
            if message.get("content") and self._content_forms(message["role"]) == ():
                found.append(f"the texts of messages with the role {message['role']}")
            for shape, function in _functions(message):
                missing, _ = self._call_forms(shape)
                if CALLED in missing:
                    found.append("calls of tools")
                elif missing and function.get("arguments") not in (None, "", "{}", {}):
                    found.append("the arguments of calls of tools")
        return list(dict.fromkeys(found))

    def fitted(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in the forms that the template takes. Raises :class:`RowError` for arguments that are
        not JSON, where it takes objects."""
        return [self._with_arguments(self._with_content(message)) for message in messages]

    def _with_content(self, message: Message) -> Message:
        content = message.get("content")
        if content is None:
            return message
        is_text = isinstance(content, str)
        given = TEXT if is_text else PARTS if len(content) > 1 else ONE_PART
        forms = self._content_forms(message["role"])
        if not forms or given in forms:
            return message
        text = content if is_text else "\n".join(part["text"] for part in content)
        return {**message, "content": text if forms[0] == TEXT else [{"type": "text", "text": text}]}

    def _with_arguments(self, message: Message) -> Message:
        found = copy.deepcopy(message) if any(_functions(message)) else message
        for shape, function in _functions(found):
            arguments, (_, forms) = function.get("arguments"), self._call_forms(shape)
            if isinstance(arguments, dict) and forms == (TEXT,):
                function["arguments"] = json.dumps(arguments, ensure_ascii=False)
            elif isinstance(arguments, str) and forms == (OBJECT,):
                try:
                    function["arguments"] = json.loads(arguments or "{}")
                except (ValueError, RecursionError) as error:
                    what = f"the arguments of a call of {function.get('name')} are not JSON ({error})"
                    raise RowError(f"{what}, and the chat template takes an object") from error
        return found

    def _find_content_forms(self, role: str) -> tuple[str, ...] | None:
        """The forms of which a role's message is shown whole; None if the template raises in any."""
        found: dict[str, bool] = {}
        for form, content in CONTENTS.items():
            for text in self._prompts({"role": role, "content": content, **RESULT_OF}):
                found[form] = FIRST in text and SECOND in text and ASIDE not in text
                if found[form]:
                    break
        return tuple(form for form in found if found[form]) if found else None

    def _find_call_forms(self, shape: str) -> tuple[set[str], tuple[str, ...]]:
        """Which words of a call are shown nowhere, and the forms in which its arguments are shown as JSON or
        one by one: not in Python's notation, and not as JSON within JSON."""
        rendered, forms = "", []
        for form, arguments in ARGUMENTS.items():
            for content in ("", None):
                message = _call(shape, {"name": CALLED, "arguments": arguments}, content)
                for text in self._prompts(self._with_content(message)):
                    rendered += f"{text}\n"
                    if FIRST in text and f"'{KEY}'" not in text and f'\\"{KEY}' not in text:
                        forms.append(form)
        missing = {word for word in (CALLED, FIRST) if rendered and word not in rendered}
        return missing, tuple(dict.fromkeys(forms))

    def _prompts(self, message: Message, places: Sequence[str] = PLACES) -> Iterator[str]:
        """Prompts of small conversations with the message, those that the template renders."""
        for arguments in ({"a": 1}, '{"a": 1}'):
            for as_content in (lambda text: text, lambda text: [{"type": "text", "text": text}]):
                others = {
                    "u": {"role": "user", "content": as_content("Add.")},
                    "a": {"role": "assistant", "content": as_content("Added.")},
                    "c": _call("nested", {"name": "add", "arguments": arguments}, as_content("")),
                    "r": {"role": "tool", "content": as_content("1"), **RESULT_OF},
                }
                for place in places:
                    with contextlib.suppress(Exception):  # a template can raise anything
                        yield self._render([others.get(letter, message) for letter in place]).lower()


def _call(shape: str, function: Message, content: Any) -> Message:
    """A message with a call: ``nested`` as OpenAI's, ``flat``, or OpenAI's former ``function_call``."""
    if shape == "function_call":
        return {"role": "assistant", "content": content, shape: function}
    call = {"id": CALL_ID, "type": "function", **({"function": function} if shape == "nested" else function)}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _functions(message: Message) -> Iterator[tuple[str, Message]]:
    """The functions that a message calls, with the shape of the call."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            function = call.get("function")
            yield ("nested", function) if isinstance(function, dict) else ("flat", call)
    if not calls and isinstance(message.get("function_call"), dict):
        yield "function_call", message["function_call"]
