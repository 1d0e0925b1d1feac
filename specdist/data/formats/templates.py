"""Prompts that a Jinja template writes from a row's columns.

Lines and ``tojson`` are as in transformers' chat templates: a line of one tag leaves none, and JSON is that
of ``json.dumps``. A template reads no files and draws nothing at random, so that a row has the same prompt at
every start.
"""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from jinja2 import StrictUndefined, TemplateSyntaxError, Undefined, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdist.data.formats.inputs import describe_columns
from specdist.utils.errors import UserError

OPTION = "--prompt_template"
# Jinja's functions; a column of the same name comes first.
FUNCTIONS = ImmutableSandboxedEnvironment().globals
del FUNCTIONS["lipsum"]  # draws at random


class _Template:
    """One text, which messages name as ``shown``. Raises :class:`UserError` if it is not a template."""

    def __init__(self, shown: str, text: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_printed
        )
        environment.globals = {}
        environment.filters["tojson"] = _to_json
        del environment.filters["random"]
        self.shown = shown
        try:
            self.names = meta.find_undeclared_variables(environment.parse(text))
            self._template = environment.from_string(text)
        except (TemplateSyntaxError, RecursionError) as error:
            place = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            raise UserError(f"{shown}{place} is not valid in Jinja: {error.args[0]}; correct it") from error

    def render(self, values: Mapping[str, Any]) -> str:
        """Raises ValueError, with the reason and the line; also for an empty text."""
        try:
            text = self._template.render({**FUNCTIONS, **values})
            text.encode()
        except Exception as error:  # of any kind, and of this row alone
            frames = traceback.walk_tb(error.__traceback__)
            lines = [line for frame, line in frames if frame.f_code.co_filename == "<template>"]
            raise ValueError(f"{self.shown}{f', line {lines[-1]}' if lines else ''}: {error}") from error
        if not text:
            raise ValueError(f"{self.shown} gives an empty text")
        return text


class PromptTemplate:
    """What ``--prompt_template``, and ``--system_prompt`` beside it, make of a row.

    ``given``: a file's name, or the template itself. ``is_chat``: the text is a message of the user. Raises
    :class:`UserError` for a file that cannot be read, and for text that is not a template.
    """

    def __init__(self, given: str, *, system_prompt: str | None = None, is_chat: bool = False) -> None:
        is_text = "{{" in given or "{%" in given
        self.text, self.is_chat = given if is_text else _read(given), is_chat
        # By the roles of messages, in their order.
        self._parts = {} if system_prompt is None else {"system": _Template("--system_prompt", system_prompt)}
        self._parts["user"] = _Template(OPTION if is_text else f"{OPTION} {given}", self.text)
        # The columns that it reads, by their names in the template.
        self.columns: dict[str, str] = {}

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a manifest has of it."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        return {"prompt_template": {"text": self.text, "sha256": digest}, "chat": self.is_chat}

    def bind(self, path: str, schema: pa.Schema, renamed: Mapping[str, str]) -> None:
        """Find its columns in a ``schema``; ``renamed``: their names there by those in the file. Raises
        :class:`UserError` for a name that no column has, and for a template without any."""
        known = {**renamed, **{name: name for name in schema.names}}
        for part in self._parts.values():
            if unknown := sorted(part.names - known.keys() - FUNCTIONS.keys()):
                raise UserError(
                    f"{part.shown} reads {', '.join(unknown)}, but the columns of --prompts {path} are "
                    f"{describe_columns(schema)}: correct the template"
                )
            self.columns |= {name: known[name] for name in part.names & known.keys()}
        if not self._parts["user"].names & known.keys():
            raise UserError(
                f"{self._parts['user'].shown} reads no column, so that all rows would have the same prompt: "
                "name one as in {{ question }}"
            )

    def of(self, row: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        """The prompt of a row with these columns: a text or, for a chat, messages. Raises ValueError with
        the reason why a row has none."""
        values = {name: row[column] for name, column in self.columns.items()}
        texts = {role: part.render(values) for role, part in self._parts.items()}
        messages = [{"role": role, "content": text} for role, text in texts.items()]
        return messages if self.is_chat else texts["user"]


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{OPTION} {name} is not a file that can be read ({error}), nor a template, which names columns "
            "as in {{ question }}: correct it"
        ) from error


def _printed(value: Any) -> Any:
    """What is printed. Raises ValueError for null, of which Jinja would make the word None, and for a
    function, whose text is another in each process."""
    if value is None:
        raise ValueError("a value is null; {{ name or '' }} says what to write instead")
    if callable(value) and not isinstance(value, Undefined):
        raise ValueError("a function is not text; for a key of its name use value['name']")
    return value


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
