"""OpenAI's batch format in: a request per line, ``{"custom_id", "method", "url", "body"}``.

Every request becomes a row with its body as it was given, and its options and constraint as columns that rows
of any input may have. What a row asks for and cannot get is its error; the run goes on. The format:
https://platform.openai.com/docs/guides/batch; ``top_k``, ``min_p``, ``repetition_penalty`` and
``chat_template_kwargs``, ``continue_final_message`` and ``add_generation_prompt`` are vLLM's additions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from specdist.config.groups import RULES, WHOLE_NUMBERS
from specdist.config.processing import STRUCT
from specdist.data.formats.jsonl import json_chunks
from specdist.data.formats.messages import RowError, chat_messages, tools_of
from specdist.utils.errors import UserError

REQUEST_KEYS = ("custom_id", "method", "url", "body")
BODY, CONSTRAINT = "body", "constraint"
CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"
# No number of a request is as large.
MOST = 2**63
# Fields of a body that are a row's own options.
OPTIONS = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "seed": "seed", "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens", "n": "num_samples",
}  # fmt: skip
# Fields that change no token of a batch: the model is the run's target.
IGNORED = frozenset(
    ["model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
     "stream_options", "parallel_tool_calls"]
)  # fmt: skip
# Fields that are honoured elsewhere, and values that ask for nothing.
READ = frozenset(
    ["messages", "prompt", "tools", "tool_choice", "response_format", "stop", "logprobs",
     "top_logprobs", "chat_template_kwargs", "continue_final_message",
     "add_generation_prompt"]
)  # fmt: skip
NEUTRAL: Mapping[str, Any] = {
    "stream": False, "best_of": 1, "logit_bias": {}, "suffix": "", "echo": False
}  # fmt: skip
REMEDIES = {
    "logit_bias": "the same for all rows is --logit_bias", "stream": "a batch has no streams",
    "prompt_logprobs": "columns of all rows are --prompt_logprobs",
    "repetition_detection": "the same for all rows is --stop_repeats",
}  # fmt: skip


@dataclass(frozen=True)
class Chat:
    """A conversation, and variables of the chat template for it alone, such as its tools. ``ending``: what
    it says of the prompt's end, by the names of transformers' arguments."""

    messages: list[dict[str, Any]]
    variables: Mapping[str, Any] = field(default_factory=dict)
    ending: Mapping[str, bool] = field(default_factory=dict)


@dataclass
class Batch:
    """What a batch asks for.

    Attributes:
        url: that of all requests.
        reasons: why rows cannot be used, by row number.
        options: names of the options that any row has.
        has_constraints: whether any row has one.
        num_logprobs: likeliest tokens to write, the most of any row; None if no row asks for any.
    """

    url: str = ""
    reasons: dict[int, str] = field(default_factory=dict)
    options: list[str] = field(default_factory=list)
    has_constraints: bool = False
    num_logprobs: int | None = None

    @property
    def is_chat(self) -> bool:
        return self.url == CHAT_URL

    def read(self, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
        """The body, options and constraint of the request of this row, as columns have them."""
        body = row[BODY]
        own: dict[str, Any] = {}
        constraint = text = None
        try:
            text = _body_text(body)
            own, constraint, asked = _asked(row)
            prompt_of_body(body, is_chat=self.is_chat)
            if asked is not None:
                self.num_logprobs = max(asked, self.num_logprobs or 0)
        except RowError as error:
            self.reasons[number] = error.reason
        self.options += own.keys() - set(self.options)
        self.has_constraints |= constraint is not None
        return {BODY: text, STRUCT: own or None, CONSTRAINT: constraint}


def is_batch(files: Sequence[Path]) -> bool:
    """Whether the first line is a request. Raises :class:`UserError` for one that is not JSON."""
    if not files[0].name.endswith((".jsonl", ".jsonl.gz", ".json", ".json.gz")):
        return False
    first = next(iter(json_chunks(files[0], 1)), None)
    return first is not None and _is_request(first.rows[0])


def _is_request(row: Mapping[str, Any]) -> bool:
    return all(name in row for name in REQUEST_KEYS) and isinstance(row[BODY], dict)


def read_batch(files: Sequence[Path]) -> tuple[Batch, pa.Table]:
    """The requests of files, and what they ask for: the columns ``options`` and ``constraint`` are there if
    any has some. Raises :class:`UserError` for a line that is not a request, for a ``custom_id`` that occurs
    twice, and for a url that differs from those before."""
    batch, known, first_place = Batch(), set[str](), ""
    columns: dict[str, list[Any]] = {name: [] for name in (*REQUEST_KEYS, STRUCT, CONSTRAINT)}
    num_rows = 0
    for path in files:
        for chunk in json_chunks(path):
            for line, row in zip(chunk.places, chunk.rows, strict=True):
                place = f"--prompts {path}, {line}"
                _check_request(place, row, known)
                if not first_place:
                    batch.url, first_place = row["url"], place
                if row["url"] != batch.url:
                    raise UserError(
                        f"{place} has url {row['url']!r}, but {first_place} has {batch.url!r}: it must be "
                        "the same in all rows; split the file"
                    )
                values = {**row, **batch.read(num_rows, row)}
                num_rows += 1
                for name, column in columns.items():
                    column.append(values[name])
    types: dict[str, pa.DataType] = dict.fromkeys((*REQUEST_KEYS, CONSTRAINT), pa.string())
    kinds = {"stop": pa.list_(pa.string()), **dict.fromkeys(WHOLE_NUMBERS, pa.int64())}
    types[STRUCT] = pa.struct([(name, kinds.get(name, pa.float64())) for name in sorted(batch.options)])
    if not batch.options:
        del columns[STRUCT]
    if not batch.has_constraints:
        del columns[CONSTRAINT]
    return batch, pa.table({name: pa.array(column, types[name]) for name, column in columns.items()})


def _check_request(place: str, row: Mapping[str, Any], known: set[str]) -> None:
    if not _is_request(row) or not _is_text(row["custom_id"]):
        raise UserError(
            f"{place} is not a request of a batch, as the first line is: it needs custom_id (text), method, "
            "url and body (an object)"
        )
    if row["custom_id"] in known:
        raise UserError(f"{place} has the custom_id {row['custom_id']!r} of a row before it: give it another")
    known.add(row["custom_id"])
    if row["url"] not in (CHAT_URL, TEXT_URL) or row["method"] != "POST":
        raise UserError(
            f"{place} asks for {row['method']} {row['url']}, but requests must be POST {CHAT_URL} or POST "
            f"{TEXT_URL}"
        )


def _is_text(value: Any) -> bool:
    # What is no UTF-8 was read as surrogates.
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _body_text(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"body is not valid UTF-8: {error.reason}") from error
    return text


def _asked(row: Mapping[str, Any]) -> tuple[dict[str, Any], str | None, int | None]:
    """A row's options, constraint and number of likeliest tokens. Raises :class:`RowError`."""
    body = {name: value for name, value in row[BODY].items() if value is not None}
    for name, value in body.items():
        if name in NEUTRAL and value == NEUTRAL[name]:
            continue
        if name not in OPTIONS and name not in IGNORED and name not in READ:
            raise RowError(f"body.{name} cannot be a row's own: {REMEDIES.get(name, 'leave it out')}")
    found: dict[str, Any] = {OPTIONS[name]: _number(name, body[name]) for name in OPTIONS if name in body}
    stop = body.get("stop")
    if stop is not None and stop != []:
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
            raise RowError("body.stop must be a text or a list of texts, none of them empty")
        found["stop"] = stops
    constraint = _constraint(body.get("response_format"))
    if constraint is not None and "stop" in found:
        raise RowError(
            "body.stop and body.response_format exclude each other: a stop string could end a completion "
            "before it matches its schema"
        )
    return found, constraint, num_logprobs_of(body, is_chat=row["url"] == CHAT_URL)


def _number(name: str, value: Any) -> int | float:
    rule = RULES[OPTIONS[name]]
    is_whole = OPTIONS[name] in WHOLE_NUMBERS
    kind: Any = int if is_whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or abs(value) >= MOST or not rule.holds(value):
        kinds = "a whole number" if is_whole else "a number"
        raise RowError(f"body.{name} is {value!r}, but it must be {kinds}, and {rule.text}")
    number: int | float = rule.kept(value)
    return number


def _constraint(response_format: Any) -> str | None:
    """A response format as the constraint column takes it."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return json.dumps({"json_schema": {"type": "object"}})
    described = response_format.get("json_schema") if kind == "json_schema" else None
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise RowError(
            "body.response_format must have the type text, json_object, or json_schema with a "
            "json_schema.schema"
        )
    return json.dumps({"json_schema": described["schema"]})


def num_logprobs_of(body: Mapping[str, Any], *, is_chat: bool) -> int | None:
    """How many likeliest tokens a request asks for; None without log-probabilities."""
    asked = body.get("logprobs")
    if asked is None or asked is False:
        return None
    number = (body.get("top_logprobs") or 0) if is_chat else asked
    is_number = isinstance(number, int) and not isinstance(number, bool) and 0 <= number < MOST
    if not is_number or (is_chat and asked is not True):
        raise RowError("body.logprobs and body.top_logprobs do not say how many log-probabilities to write")
    return int(number)


def prompt_of_body(body: Mapping[str, Any], *, is_chat: bool) -> str | Chat:
    """A request's prompt, of one that a :class:`Batch` has no reason against."""
    if not is_chat:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str) or not prompt:
            raise RowError("body.prompt must be one text, and not empty")
        return prompt
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RowError("body.messages must be a list of messages, and not empty")
    extra = body.get("chat_template_kwargs")
    if extra is not None and not isinstance(extra, dict):
        raise RowError("body.chat_template_kwargs must be an object")
    choice = body.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise RowError(f"body.tool_choice {choice!r} cannot be forced: use auto or none")
    tools = tools_of("body.tools", body.get("tools")) if choice == "auto" else []
    chat = chat_messages("body.messages", messages)
    return Chat(chat, {**(extra or {}), **({"tools": tools} if tools else {})}, _ending(body))


def _ending(body: Mapping[str, Any]) -> dict[str, bool]:
    names = ("continue_final_message", "add_generation_prompt")
    continues, begins = (body.get(name) for name in names)
    if not isinstance(continues, bool | None) or not isinstance(begins, bool | None):
        raise RowError(f"body.{names[0]} and body.{names[1]} must be true or false")
    if continues and begins:
        raise RowError(f"body.{names[0]} and body.{names[1]} exclude each other: set one of them to false")
    if continues is None and begins is None:
        return {}
    return {names[0]: bool(continues), names[1]: not continues if begins is None else begins}
