"""The options of prompts: where they come from, and what the chat template gets beside messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from specdist.config.arguments import option
from specdist.utils.errors import UserError
from specdist.utils.rules import Refusals, Rule

# Roles of a first message that a template writes as the system prompt.
SYSTEM_ROLES = ("system", "developer")
# Arguments of transformers' ``apply_chat_template`` that are not variables of the template.
RESERVED = frozenset(
    ["conversation", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
     "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
     "return_assistant_tokens_mask", "tokenizer_kwargs", "messages"]
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """What chat messages become before and in the chat template.

    Attributes:
        system_prompt: of conversations that do not begin with a system message of their own.
        variables: of the template, by name.
        continues: a last message of the assistant is continued, instead of answered.
        now: the local time that ``strftime_now`` in a template tells, the same for all prompts.
    """

    system_prompt: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    now: datetime = field(default_factory=datetime.now)

    def messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """A conversation with its system prompt."""
        if self.system_prompt is None or (messages and messages[0]["role"] in SYSTEM_ROLES):
            return list(messages)
        return [{"role": "system", "content": self.system_prompt}, *messages]


@dataclass(kw_only=True)
class ChatOptions:
    """What the chat template gets beside the messages."""

    _argument_group_name = "Prompts"

    system_prompt: str | None = option(
        None, rule=Rule(bool, "must not be empty; leave the option out instead"),
        help="system message of chats that do not begin with one of their own",
    )  # fmt: skip
    chat_template_kwargs: str | None = option(
        None, help='JSON object of variables for the chat template, such as {"enable_thinking": false}'
    )

    chat_template: str | None = option(
        None, help="Jinja file that is used in place of the chat template of the target's tokenizer"
    )
    continue_final_message: bool = option(
        False,
        help="continue the last message of chats that end with one of the assistant, instead of beginning "
        "another turn",
    )

    @property
    def chat_template_text(self) -> str | None:
        """The file's content. Raises :class:`UserError` if it cannot be read."""
        if self.chat_template is None:
            return None
        try:
            return Path(self.chat_template).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"--chat_template {self.chat_template}: name a file of text ({error})") from error

    @property
    def chat_format(self) -> ChatFormat:
        """Raises :class:`UserError` for variables that are not a JSON object, or not the template's."""
        if self.chat_template_kwargs is None:
            return ChatFormat(system_prompt=self.system_prompt, continues=self.continue_final_message)
        shown = f"--chat_template_kwargs {self.chat_template_kwargs}"
        try:
            variables = json.loads(self.chat_template_kwargs)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f'{shown} is not valid JSON ({error}): write an object, such as {{"enable_thinking": false}}'
            ) from error
        if not isinstance(variables, dict) or not variables:
            raise UserError(f'{shown} must be a JSON object, such as {{"enable_thinking": false}}')
        reserved = ", ".join(name for name in variables if name in RESERVED)
        if reserved:
            raise UserError(
                f"{shown}: {reserved} is not a variable of a chat template, but set by this program: "
                "leave it out"
            )
        return ChatFormat(
            system_prompt=self.system_prompt, variables=variables, continues=self.continue_final_message
        )

    @property
    def chat_fingerprint(self) -> dict[str, Any]:
        """The chat options in the manifest; nothing without them, as in older runs."""
        template = (self.chat_template_text or "").encode()
        found = {
            "chat_template": hashlib.sha256(template).hexdigest() if template else None,
            "system_prompt": self.system_prompt,
            "chat_template_kwargs": dict(self.chat_format.variables) or None,
            "continue_final_message": self.continue_final_message or None,
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclass(kw_only=True)
class PromptOptions(ChatOptions):
    """Where prompts come from."""

    _argument_group_name = "Prompts"
    _url_options: ClassVar[tuple[str, ...]] = ("prompts",)
    # Of these one on the command line stands in the place of the file's others.
    _alternatives = frozenset(("prompt_column", "messages_column", "turns_column", "prompt_template"))

    prompts: list[str] = option(
        action="extend",
        help="Arrow IPC file or folder, save_to_disk folder, Parquet, JSONL or CSV; its URL (s3://, gs://, "
        "hf://); or several, or a glob, whose rows follow one another",
    )
    prompt_column: str | None = option(None, help="column that holds the prompt text (default: prompt)")
    messages_column: str | None = option(
        None, help="column of chat messages, formatted with the chat template"
    )

    _refusals: ClassVar[Refusals] = (
        ("prompt_column", lambda o: o.messages_column is not None,
         "and --messages_column {o.messages_column} exclude each other: name the column of plain prompts "
         "or the column of chat messages"),
    )  # fmt: skip

    def resolve_prompts(self) -> None:
        """Fill in the column. Raises :class:`UserError` for a template or variables that cannot be read."""
        _ = self.chat_format, self.chat_template_text
        if self.messages_column is None:
            self.prompt_column = self.prompt_column or "prompt"


@dataclass(kw_only=True)
class TurnOptions(PromptOptions):
    """Prompts, those that a template writes, and conversations of which the input has the user's side
    alone."""

    _argument_group_name = "Prompts"

    turns_column: str | None = option(
        None,
        help="column of lists of user messages: each is answered in turn, with the answers before it, in "
        "the chat template",
    )
    prompt_template: str | None = option(
        None,
        help="Jinja template that writes a row's prompt from its columns: a file, or the text itself, such "
        'as "Translate: {{ text }}"; --system_prompt is then such a text, too',
    )
    chat: bool = option(
        False, help="the text of --prompt_template is a message of the user, for the chat template"
    )
    keep_errors: bool = option(
        False, help="of --prompts that a run has written, read also the rows that have errors"
    )
    unfinished: bool = option(False, help="of a run in --prompts that is not complete, read what is")
    preview: int | None = option(
        None, at_least=1,
        help="write nothing: print prompts and completions of the first N rows, and what all would take",
    )  # fmt: skip

    _refusals: ClassVar[Refusals] = (
        ("prompt_column messages_column turns_column", lambda o: o.prompt_template is not None,
         "and --prompt_template exclude each other: leave one of them out; a template reads any column"),
        ("chat", lambda o: o.prompt_template is None,
         "has no effect without --prompt_template: give one, or name a column of chats in --messages_column"),
        ("system_prompt chat_template_kwargs", lambda o: o.prompt_template is not None and not o.chat,
         "has no effect on prompts of --prompt_template without --chat: give it, too, or leave this out"),
        ("continue_final_message", lambda o: o.prompt_template is not None,
         "has no effect with --prompt_template, whose text is a message of the user: leave it out"),
        ("turns_column", lambda o: o.prompt_column is not None,
         "and --prompt_column {o.prompt_column} exclude each other: name the one that has the prompts"),
        ("turns_column", lambda o: o.messages_column != o.turns_column,
         "and --messages_column {o.messages_column} exclude each other: name the one that has the prompts"),
        ("continue_final_message", lambda o: o.turns_column is not None,
         "has no effect with --turns_column {o.turns_column}, which ends with the user: leave it out"),
        ("trace logprobs prompt_logprobs", lambda o: o.turns_column is not None,
         "describes one completion of a row, and with --turns_column {o.turns_column} a row has several: "
         "leave one of them out, or give whole conversations in --messages_column"),
        ("overwrite push_to_hub", lambda o: o.preview is not None,
         "has no effect with --preview, which writes nothing: leave one of them out"),
    )  # fmt: skip

    def resolve_prompts(self) -> None:
        """Fill in the column: that of turns is one of messages, and a template needs none. Raises as without
        turns."""
        # From Python one path may stand alone.
        self.prompts = [self.prompts] if isinstance(self.prompts, str) else list(self.prompts)
        if self.prompt_template is None:
            self.messages_column = self.messages_column or self.turns_column
            super().resolve_prompts()
