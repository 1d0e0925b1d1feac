"""The input: prompts in Arrow, Parquet, JSONL or CSV files, checked as a whole before any model is loaded."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from specdist.data.columns import OUTPUT_COLUMNS
from specdist.data.formats.batches import BODY, Batch, Chat, prompt_of_body
from specdist.data.formats.columns import is_list, is_text
from specdist.data.formats.input_rows import InputRows
from specdist.data.formats.inputs import describe_columns, files_at, globbed, read_inputs, shown
from specdist.data.formats.json_columns import JsonError, holds_json
from specdist.data.formats.jsonl import PromptColumn
from specdist.data.formats.messages import (
    TOOLS,
    MessageError,
    RowError,
    chat_messages,
    tools_of,
    why_not_text,
    why_not_turns,
)
from specdist.data.formats.run_rows import as_input
from specdist.data.formats.templates import OPTION, PromptTemplate
from specdist.data.store.copies import fetched
from specdist.data.store.files import WatchedFiles
from specdist.utils.errors import UserError


@dataclass(frozen=True, eq=False)
class Prompts:
    """The input rows. Rows are numbered from 0; Arrow and Parquet files stay on disk until a row is read."""

    files: tuple[Path, ...]
    rows: InputRows
    column: str
    watched: WatchedFiles
    unusable: Mapping[int, str]
    """Why rows of a JSONL file have no prompt: values of the wrong type."""
    is_chat: bool
    batch: Batch | None = None
    """What requests of OpenAI's batch format ask for; None if the rows are no such requests."""
    has_turns: bool = False
    """Whether a row is a list of user messages, to be answered in turn."""
    template: PromptTemplate | None = None
    """What writes the prompts, in the place of a column."""

    @property
    def num_rows(self) -> int:
        return self.rows.num_rows

    @property
    def schema(self) -> pa.Schema:
        """Names and types of all input columns."""
        return self.rows.schema

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the files' SHA-256s in order; names do not matter."""
        return self.watched.fingerprint()

    @property
    def has_tools(self) -> bool:
        """Whether there is a column of tools for the chat template."""
        is_conversation = self.is_chat and self.batch is None and self.template is None
        return is_conversation and TOOLS in {*self.schema.names} - {self.column}

    def table(self, start: int, stop: int) -> pa.Table:
        """All input columns of rows ``start`` to ``stop - 1``, as a copy in memory.

        Raises :class:`UserError` if one of their files changed.
        """
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.schema) as writer:
            writer.write_table(self.rows.read(start, stop))
        self._check_files(start, stop)
        return pa.ipc.open_stream(sink.getvalue()).read_all()

    def num_beginning_with(self, text: str, num_rows: int) -> int:
        """How many of the first rows' prompts, if they are texts, begin with a text."""
        if self.is_chat:
            return 0
        if self.batch is not None or self.template is not None:
            prompts = map(self._prompt_or_none, range(num_rows))
            return sum(isinstance(prompt, str) and prompt.startswith(text) for prompt in prompts)
        self._check_files(0, num_rows)
        column = self.rows.read(0, num_rows, [self.column]).column(0)
        return sum(value is not None and value.startswith(text) for value in column.to_pylist())

    def _prompt_or_none(self, row: int) -> str | list[dict[str, Any]] | Chat | None:
        try:
            return self.prompt(row)
        except RowError:
            return None

    def check_column(self, option: str, column: str) -> None:
        """Raises :class:`UserError`, which names the ``option``, if the column is missing."""
        if column not in self.schema.names:
            raise UserError(
                f"{option} {column} is not a column of --prompts {self.files[0]}, which has "
                f"{describe_columns(self.schema)}"
            )

    def check_no_batch(self, job: str) -> None:
        """Raises :class:`UserError`, which names the ``job``, for requests of OpenAI's batch format."""
        if self.batch is not None:
            raise UserError(
                f"--prompts {self.files[0]} holds requests of OpenAI's batch format, each with options of "
                f"its own, which {job} gives to no row: use jobs/generate.py, or give the prompts alone in "
                "a column (--prompt_column or --messages_column)"
            )

    def values(self, option: str, column: str) -> Iterator[Any]:
        """A column's value in every row. Raises :class:`UserError`, which names the ``option``, for bad JSON
        in one of them."""
        try:
            yield from self.rows.values(column)
        except JsonError as error:
            row, reason = next(filter(None, (self._damage(column, row) for row in range(self.num_rows))))
            raise UserError(f"{option} {column}: row {row} cannot be read ({reason}): correct it") from error

    def _damage(self, column: str, row: int) -> tuple[int, str] | None:
        """A row whose value cannot be read, and why."""
        try:
            self.value(column, row)
        except RowError as error:
            return row, error.reason
        return None

    def prompt(self, row: int) -> str | list[dict[str, Any]] | Chat:
        """A row's text, or its chat messages; of several turns the first.

        Raises :class:`RowError` for an unusable row, and :class:`UserError` if its file changed.
        """
        if row in self.unusable:
            raise RowError(self.unusable[row])
        if self.template is not None:
            return self._rendered(self.template, row)
        value = self.value(self.column, row)
        if value is None:
            raise RowError(f"{self.column} is null")
        if self.has_turns:
            return self.with_tools(row, [{"role": "user", "content": self.turn(row, 0)}])
        if self.batch is not None:
            return prompt_of_body(json.loads(value), is_chat=self.is_chat)
        if not self.is_chat and (reason := why_not_text(self.column, value)) is not None:
            raise RowError(reason)
        if not value:
            raise RowError(f"{self.column} is empty")
        return value if isinstance(value, str) else self.with_tools(row, self._messages(value))

    def values_of(self, row: int, columns: Collection[str] | None = None) -> dict[str, Any]:
        """A row's values in these columns, or in all. Raises as :meth:`prompt` does."""
        self._check_files(row, row + 1)
        try:
            return self.rows.row(row, self.schema.names if columns is None else sorted(columns))
        except JsonError as error:
            raise RowError(f"a column of the row is not valid JSON: {error}") from error

    def _rendered(self, template: PromptTemplate, row: int) -> str | list[dict[str, Any]]:
        values = self.values_of(row, {*template.columns.values()})
        try:
            return template.of(values)
        except ValueError as error:
            raise RowError(str(error)) from error

    def with_tools(self, row: int, messages: list[dict[str, Any]]) -> list[dict[str, Any]] | Chat:
        """A row's messages with its tools, if it has some. Raises as :meth:`prompt` does."""
        try:
            tools = tools_of(TOOLS, self.value(TOOLS, row)) if self.has_tools else []
        except MessageError as error:
            raise RowError(f"{error}; a column of another meaning needs another name") from error
        return Chat(messages, {TOOLS: tools}) if tools else messages

    def _messages(self, value: Any) -> list[dict[str, Any]]:
        messages = chat_messages(self.column, value)
        if not holds_json(self.schema.field(self.column).type):
            for message in messages:
                # A null of a struct is read as absent, but is what content is beside calls of tools.
                message.setdefault("content", None)
        return messages

    def num_turns(self, row: int) -> int:
        """User messages of a row. Raises as :meth:`prompt` does."""
        return len(self._turns(row))

    def turn(self, row: int, index: int) -> str:
        """One of a row's user messages. Raises as :meth:`prompt` does."""
        text = self._turns(row)[index]
        if not text:
            raise RowError(f"{self.column}[{index}] is {'null' if text is None else 'empty'}")
        return text

    def _turns(self, row: int) -> list[str | None]:
        turns = self.value(self.column, row)
        if not turns:
            raise RowError(f"{self.column} is {'null' if turns is None else 'empty'}")
        if (reason := why_not_turns(self.column, turns)) is not None:
            raise RowError(reason)
        return list(turns)

    def value(self, column: str, row: int) -> Any:
        """A row's value in another column. Raises as :meth:`prompt` does."""
        self._check_files(row, row + 1)
        try:
            return self.rows.row(row, [column])[column]
        except JsonError as error:
            raise RowError(f"{column} is not valid JSON: {error}") from error

    def _check_files(self, start: int, stop: int) -> None:
        """Memory-mapped rows would change with their file, and a truncated file would crash the process."""
        ends = self.rows.ends
        if ends is not None:
            for index in range(bisect_right(ends, start), bisect_left(ends, stop) + 1):
                self.watched.check(index)


def open_prompts(
    paths: str | Sequence[str],
    *,
    prompt_column: str | None,
    messages_column: str | None,
    has_turns: bool = False,
    limit: int | None,
    cache_dir: str | None = None,
    files: Sequence[Path] = (),
    keep_errors: bool = False,
    template: PromptTemplate | None = None,
) -> Prompts:
    """Open and check the first ``limit`` rows (None = all) of a file or folder of prompts, or of a URL, which
    is fetched into the ``cache_dir``; or of several, one after the other.

    Takes Arrow IPC, a ``datasets.save_to_disk`` folder, Parquet, JSONL or CSV, and exactly one of the
    two columns and the ``template``; with ``has_turns`` the messages are texts of the user's turns. Of
    requests of OpenAI's batch format the column is their body, whether it is named or the default.
    ``files``: those at the paths, where they are known. ``keep_errors``: of what a run has written.
    Raises :class:`UserError` if a file cannot be used, with the file and the line or column.
    """
    paths = [paths] if isinstance(paths, str) else paths
    path = shown(paths)
    files = list(files) or [
        file for each in globbed(paths) for file in files_at(each, fetched(each, cache_dir))
    ]
    watched = WatchedFiles(files)
    given = (prompt_column, messages_column, template)
    assert sum(each is not None for each in given) == 1, "the configuration names one of them"
    column = PromptColumn(
        messages_column or prompt_column or "", is_chat=messages_column is not None, is_turns=has_turns
    )
    found = read_inputs(path, files, column)
    if found.rows.num_rows == 0:
        raise UserError(f"--prompts {path} has no rows: there is nothing to generate")
    column.check(path)
    found, renamed = as_input(path, found, keep_errors=keep_errors, has_template=template is not None)
    rows = found.rows
    if template is not None:
        template.bind(path, rows.schema, renamed)
        name = OPTION
    elif messages_column is not None:
        option = "--turns_column" if has_turns else "--messages_column"
        field = _field(path, rows.schema, option, messages_column)
        _check_turns_type(field) if has_turns else _check_messages_type(field)
        name = field.name
    else:
        field = _field(path, rows.schema, "--prompt_column", BODY if found.batch else column.name)
        if not _is_text(field.type):
            raise UserError(
                f"--prompt_column {field.name} has type {field.type}, but a prompt must be text (string); "
                "for chat messages use --messages_column"
            )
        name = field.name
    _check_output_names(path, rows.schema, prompt_column)
    return Prompts(
        files=tuple(files),
        rows=rows if limit is None else rows.limited(limit),
        column=name,
        watched=watched,
        unusable=found.unusable,
        is_chat=column.is_chat or any(each.is_chat for each in (found.batch, template) if each is not None),
        batch=found.batch,
        has_turns=has_turns,
        template=template,
    )


def _check_output_names(path: str, schema: pa.Schema, prompt_column: str | None) -> None:
    taken = [name for name in schema.names if name in OUTPUT_COLUMNS]
    if prompt_column == "prompt" and "prompt" in taken:
        taken.remove("prompt")
    if taken:
        raise UserError(
            f"--prompts {path} has columns with names that the output reserves: {', '.join(taken)}; rename "
            "them"
        )


def _field(path: str, schema: pa.Schema, option: str, name: str) -> pa.Field:
    if name not in schema.names:
        raise UserError(
            f"{option} {name} is not a column of --prompts {path}, which has {describe_columns(schema)}; "
            "name the column with --prompt_column (text), --messages_column (chat) or "
            "--turns_column (messages of the user)"
        )
    if pa.types.is_null(schema.field(name).type):
        raise UserError(
            f"{option} {name} is null in every row of --prompts {path}, which has "
            f"{describe_columns(schema)}: name the column of the prompts"
        )
    return schema.field(name)


def _is_text(kind: pa.DataType) -> bool:
    """Whether its values are text; whether those of JSON are, each row tells."""
    return is_text(kind) or isinstance(kind, pa.JsonType)


def _check_turns_type(field: pa.Field) -> None:
    kind = field.type
    if not isinstance(kind, pa.JsonType) and not (is_list(kind) and _is_text(kind.value_type)):
        raise UserError(
            f"--turns_column {field.name} has type {kind}, but it must be a list of texts, the "
            "messages of the user; for conversations with roles use --messages_column"
        )


def _check_messages_type(field: pa.Field) -> None:
    kind = field.type
    message = kind.value_type if is_list(kind) else kind
    types = {item.name: item.type for item in message} if pa.types.is_struct(message) else {}
    if isinstance(message, pa.JsonType) or (
        is_list(kind)
        and _is_text(types.get("role", pa.null()))
        and any(test(types.get("content", pa.bool_())) for test in (_is_text, is_list, pa.types.is_null))
    ):
        return
    raise UserError(
        f"--messages_column {field.name} has type {field.type}, but chat messages must be a list of structs "
        "with the strings role and content; for plain text use --prompt_column"
    )
