"""The prompts of a call from Python: what they are, their tokens, and what is to be said of them."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from specdist.data.formats.messages import MessageError, chat_messages
from specdist.data.formats.prompts import RowError
from specdist.job.models.model_plan import ModelPlan
from specdist.job.texts.tokens import (
    AFTER_ASSISTANT,
    PromptEncoder,
    added_token_warnings,
    end_token_warnings,
    load_tokenizer,
)
from specdist.models.files.checkpoint import Checkpoint
from specdist.utils.errors import UserError

# Text, token ids, or chat messages for the target's chat template.
Prompt: TypeAlias = str | Sequence[int] | Sequence[dict[str, Any]]
A_PROMPT = (
    "a prompt is a text, a sequence of token ids, or a sequence of chat messages "
    "({'role': ..., 'content': ...}), and several are a list of prompts"
)


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list. Raises :class:`UserError` for what is not a prompt."""
    # The items of a table are the names of its columns.
    is_table = isinstance(prompts, Mapping) or hasattr(prompts, "columns")
    if is_table or isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise UserError(f"prompts is {reprlib.repr(prompts)}, but {A_PROMPT}")
    items: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)  # type: ignore[arg-type]
    for place, prompt in enumerate(items):
        if isinstance(prompt, (Mapping, bytes)) or not hasattr(prompt, "__len__"):
            raise UserError(f"prompt {place} is {reprlib.repr(prompt)}, but {A_PROMPT}")
    return items


def prompt_ids(prompt: Prompt, encoder: PromptEncoder, models: ModelPlan) -> list[int]:
    """Raises :class:`RowError` for a prompt that cannot be used, and :class:`UserError` for what is none."""
    if isinstance(prompt, str):
        return encoder.prompt_ids(prompt)
    if not len(prompt):
        raise RowError("the prompt is empty")
    if isinstance(prompt[0], dict):
        try:
            return encoder.prompt_ids(chat_messages("messages", list(prompt)))
        except MessageError as error:
            raise RowError(str(error)) from error
    try:
        ids = [operator.index(token_id) for token_id in cast("Sequence[int]", prompt)]
    except TypeError as error:
        raise UserError(f"{A_PROMPT}: {error}") from error
    if min(ids) < 0 or max(ids) >= models.vocab_size:
        raise RowError(f"a token id is not in [0, {models.vocab_size})")
    if len(ids) >= models.max_seq_len:
        raise RowError(f"{len(ids)} tokens leave no room below max_seq_len {models.max_seq_len}")
    return ids


def call_warnings(
    target: Checkpoint, prompts: Collection[Any], stops: Collection[str], continues: bool
) -> list[str]:
    """What the prompts of a call from Python give reason to say before it. Raises :class:`UserError` for
    chats without a template."""
    tokenizer = load_tokenizer(target)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    lasts = [prompt[-1] for prompt in prompts if not isinstance(prompt, str) and len(prompt)]
    chats = [last for last in lasts if isinstance(last, dict)]
    if chats and not tokenizer.chat_template:
        raise UserError("chat messages need a chat template, and the target's tokenizer has none: give texts")
    found = added_token_warnings(
        tokenizer, len(texts), lambda text, most: sum(each.startswith(text) for each in texts[:most])
    )
    num_after = sum(last.get("role") == "assistant" for last in chats)
    if num_after and not continues:
        found.append(f"{num_after} of {len(prompts)} prompts {AFTER_ASSISTANT}")
    return found + end_token_warnings(tokenizer, target.stop_token_ids(), stops)
