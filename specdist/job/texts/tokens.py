"""Text to token ids and back."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import re
import shlex
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from specdist.config.prompts import RESERVED, ChatFormat
from specdist.data.formats.batches import Chat
from specdist.data.formats.prompts import Prompts, RowError
from specdist.engine.schedule.detokenizer import Detokenizer
from specdist.job.texts.template_clock import with_clock
from specdist.job.texts.template_forms import TemplateForms, example_tool
from specdist.models.files.checkpoint import SMALL_FILE_SUFFIXES, Checkpoint
from specdist.models.files.damage import reading
from specdist.utils.errors import UserError

TRIAL_TEXT = "A text."
# The tokens of tokenizers with byte fallback.
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
# What a text may stand after, for its tokens there.
TEXTS_BEFORE = ("\n", "a", ".")
# Number of prompts that stand for all.
NUM_SAMPLED = 32
# Prompts that are looked at for tokens twice, since the input may be larger than what a start has time for.
MOST_PROMPTS = 2**16
# What warnings say of chats.
AFTER_ASSISTANT = (
    "end with a message of the assistant, after which another of its turns begins: to continue that message "
    "instead, use --continue_final_message"
)

logger = logging.getLogger(__name__)


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """The model's own tokenizer; while its files stay the same it is loaded once, for all to use and none to
    change. Raises :class:`UserError` if it has none, or one that cannot be used."""
    with reading(f"{checkpoint.option} {checkpoint.name} has no tokenizer that can be loaded: it"):
        files = [path for path in sorted(checkpoint.folder.iterdir()) if path.suffix in SMALL_FILE_SUFFIXES]
        digests = tuple((path.name, hashlib.sha256(path.read_bytes()).digest()) for path in files)
        return _tokenizer_of(checkpoint.folder, checkpoint.trusts_code, digests, checkpoint.chat_template)


@functools.lru_cache(maxsize=4)
def _tokenizer_of(
    folder: Path, trusts_code: bool, digests: Hashable, chat_template: str | None
) -> PreTrainedTokenizerBase:
    """``digests``: of the files in the folder; ``chat_template``: in place of the tokenizer's own."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts_code)
    # Some damage shows only in use.
    ids = tokenizer(TRIAL_TEXT)["input_ids"]
    _text(tokenizer, ids, True)
    max(tokenizer.get_vocab().values())
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    return tokenizer


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt as one text.

    Attributes:
        text: the model's input.
        is_chat: a chat template has written it, including its special tokens.
    """

    text: str
    is_chat: bool


class PromptEncoder:
    """Turns one input row into token ids.

    ``chat_format``: what the chat template gets beside a row's messages. ``vocab_size``: ids from there on
    have no embedding, as those of tokens that were added to a tokenizer alone; by default there are none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int,
        chat_format: ChatFormat | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._chat_format = chat_format or ChatFormat()
        # The templates' forms by the form of tools, if there are any.
        self._forms: dict[bool | None, TemplateForms] = {}

    @cached_property
    def detokenizer(self) -> Detokenizer:
        """The detokenizer of the prompts' completions."""
        return detokenizer_of(self._tokenizer)

    def rendered(self, prompt: str | list[dict[str, Any]] | Chat) -> RenderedPrompt:
        """The prompt as one text: chat messages go through the chat template.

        Raises :class:`RowError` if the template refuses them, or leaves out something of them.
        """
        if isinstance(prompt, str):
            return RenderedPrompt(prompt, is_chat=False)
        chat = self._whole(prompt)
        variables = {**chat.variables, **self._own_variables(prompt)}
        left_out, is_meant = self.left_out(prompt)
        if left_out and not is_meant:
            raise RowError(f"the chat template leaves out {', '.join(left_out)}")
        messages = self._forms_of(chat).fitted(chat.messages)
        try:
            text = self._applied(messages, variables, **chat.ending)
        except Exception as error:  # a template can raise anything, and speaks of this row alone
            # What else it raises is not a word of its author's.
            how = "rejects" if type(error).__name__ == "TemplateError" else "cannot be applied to"
            raise RowError(f"the chat template {how} the messages: {error}") from error
        return RenderedPrompt(text, is_chat=True)

    def left_out(self, prompt: list[dict[str, Any]] | Chat) -> tuple[list[str], bool]:
        """What the chat template shows nowhere of that which a conversation has; and whether it is one that
        shows the end of conversations alone."""
        chat = self._whole(prompt)
        forms = self._forms_of(chat)
        return forms.left_out(chat.messages, has_tools="tools" in chat.variables), forms.shows_end_alone

    def begins_after_assistant(self, prompt: list[dict[str, Any]] | Chat) -> bool:
        """Whether another turn of the assistant begins after one."""
        chat = self._whole(prompt)
        return chat.messages[-1]["role"] == "assistant" and chat.ending["add_generation_prompt"]

    def _whole(self, prompt: list[dict[str, Any]] | Chat) -> Chat:
        """A conversation with what the run gives to all."""
        chat = prompt if isinstance(prompt, Chat) else Chat(prompt)
        messages = self._chat_format.messages(chat.messages)
        continues = self._chat_format.continues and messages[-1]["role"] == "assistant"
        ending = chat.ending or {
            "continue_final_message": continues, "add_generation_prompt": not continues
        }  # fmt: skip
        return Chat(messages, {**self._chat_format.variables, **chat.variables}, ending)

    def _forms_of(self, chat: Chat) -> TemplateForms:
        """The forms of the template with the run's variables, and with tools in the form of this row's, or
        without."""
        tools = chat.variables.get("tools")
        example = [example_tool(tools[0])] if isinstance(tools, list) and tools else None
        key = None if example is None else "function" in example[0]
        if key not in self._forms:
            variables = {**self._chat_format.variables, **({} if example is None else {"tools": example})}
            self._forms[key] = TemplateForms(lambda messages: self._applied(messages, variables))
        return self._forms[key]

    def _applied(self, messages: list[dict[str, Any]], variables: Mapping[str, Any], **ending: bool) -> str:
        template = self._tokenizer.get_chat_template(tools=variables.get("tools"))
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                chat_template=with_clock(template, self._chat_format.now),
                tokenize=False,
                **({"add_generation_prompt": True} | ending),
                **variables,
            )
        )

    def _own_variables(self, prompt: list[dict[str, Any]] | Chat) -> dict[str, Any]:
        found = dict(prompt.variables) if isinstance(prompt, Chat) else {}
        reserved = [name for name in found if name in RESERVED]
        unread = unread_variables(self._tokenizer, found)
        if reserved or unread:
            raise RowError(f"the chat template does not read {', '.join(reserved or unread)}")
        return found

    def prompt_ids(self, prompt: str | list[dict[str, Any]] | Chat) -> list[int]:
        """The prompt's tokens. Raises :class:`RowError` as the two steps do."""
        return self.token_ids(self.rendered(prompt))

    def token_ids(self, prompt: RenderedPrompt) -> list[int]:
        """Raises :class:`RowError` for a prompt of no tokens, too many, or one that the model has not."""
        # A chat template has written the special tokens already.
        token_ids: list[int] = self._tokenizer(prompt.text, add_special_tokens=not prompt.is_chat)[
            "input_ids"
        ]
        if not token_ids:
            raise RowError("the prompt has no tokens")
        last = max(token_ids)
        if self._vocab_size is not None and last >= self._vocab_size:
            raise RowError(
                f"the prompt has token {last} ({self._tokenizer.convert_ids_to_tokens(last)!r}), which the "
                f"tokenizer has and the model has not: its ids end at {self._vocab_size - 1}"
            )
        if len(token_ids) > self._max_prompt_tokens:
            raise RowError(
                f"the prompt has {len(token_ids)} tokens; with --max_seq_len {self._max_prompt_tokens + 1} "
                f"at most {self._max_prompt_tokens} leave room for a completion"
            )
        return token_ids

    def sampled_prompts(self, prompts: Prompts) -> Iterator[list[int]]:
        """Tokens of a few prompts spread over all, without those that cannot be used."""
        step = max(1, prompts.num_rows // NUM_SAMPLED)
        for row in range(0, prompts.num_rows, step):
            with contextlib.suppress(RowError):
                yield self.prompt_ids(prompts.prompt(row))


def detokenizer_of(tokenizer: PreTrainedTokenizerBase) -> Detokenizer:
    """The detokenizer of a target's tokenizer."""
    vocabulary = tokenizer.get_vocab()
    # Mistral's own tokenizers cannot say which tokens were added.
    added = tokenizer.added_tokens_decoder if getattr(tokenizer, "is_fast", False) else {}
    return Detokenizer(
        partial(_text, tokenizer),
        special_ids=frozenset(
            {*tokenizer.all_special_ids, *(token_id for token_id, token in added.items() if token.special)}
        ),
        byte_ids=frozenset(vocabulary[name] for name in BYTE_TOKENS if name in vocabulary),
    )


def _text(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], skip_special_tokens: bool) -> str:
    """The text as the model wrote it: not cleaned up, which takes spaces away before punctuation."""
    return str(
        tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
    )


def ids_within(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of a text that stands inside another: without the space that some tokenizers put where a text
    begins."""

    def ids_of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    own = ids_of(text)
    for before in TEXTS_BEFORE:
        before_ids, whole = ids_of(before), ids_of(before + text)
        is_kept = whole[: len(before_ids)] == before_ids
        for found in (own, whole[len(before_ids) :] if is_kept else own):
            if _text(tokenizer, before_ids + found, False) == _text(tokenizer, before_ids, False) + text:
                return found
    return own


def check_chat_template(checkpoint: Checkpoint, chat: str | None) -> None:
    """Raises :class:`UserError` for chat messages, which ``chat`` names, without a chat template, with which
    every row would fail, and for one of ``--chat_template`` that is not Jinja."""
    if checkpoint.chat_template is not None:
        try:
            trial = [{"role": "user", "content": TRIAL_TEXT}]
            load_tokenizer(checkpoint).apply_chat_template(trial, tokenize=False)
        except TemplateSyntaxError as error:
            raise UserError(
                f"--chat_template: line {error.lineno} of the file is not Jinja: {error.message}; correct it"
            ) from error
        except Exception:  # a template can raise anything, and says so of each row
            logger.debug("the chat template renders no single message", exc_info=True)
    if chat is not None and not load_tokenizer(checkpoint).chat_template:
        raise UserError(
            f"{chat} needs a chat template, and the tokenizer of --target "
            f"{checkpoint.name} has none: choose a chat model, name a template with --chat_template, or "
            "give plain text"
        )


def unread_variables(tokenizer: PreTrainedTokenizerBase, names: Iterable[str]) -> list[str]:
    """The names that the chat template does not mention."""
    template = tokenizer.chat_template
    text = " ".join(template.values()) if isinstance(template, dict) else template or ""
    return [name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)]


def check_chat_variables(checkpoint: Checkpoint, chat_format: ChatFormat) -> None:
    """Raises :class:`UserError` for variables that the chat template never reads."""
    unread = unread_variables(load_tokenizer(checkpoint), chat_format.variables)
    if unread:
        raise UserError(
            f"--chat_template_kwargs: the chat template of --target {checkpoint.name} does not read "
            f"{', '.join(unread)}: correct the name, or leave it out"
        )


def added_token_warnings(
    tokenizer: PreTrainedTokenizerBase,
    num_prompts: int,
    num_beginning_with: Callable[[str, int], int],
) -> list[str]:
    """What a tokenizer puts around every text prompt, where that is seldom meant.

    For texts, which are encoded as transformers does it; a chat template writes its own special tokens.

    Args:
        num_beginning_with: how many of so many first prompts begin with a text.
    """
    if not num_prompts:
        return []
    ids, own_ids = (tokenizer(TRIAL_TEXT, add_special_tokens=adds)["input_ids"] for adds in (True, False))
    found = []
    begin_id, end_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    if begin_id is not None and ids[0] == begin_id != own_ids[0]:
        text, num_seen = str(tokenizer.bos_token), min(num_prompts, MOST_PROMPTS)
        if num_double := num_beginning_with(text, num_seen):
            seen = f"the first {num_seen}" if num_seen < num_prompts else num_prompts
            found.append(
                f"{num_double} of {seen} prompts begin with {text}, which the tokenizer puts before every "
                "text itself, so that the model sees it twice, as in transformers: leave it out of the "
                "texts, or give the chats themselves with --messages_column"
            )
    if end_id is not None and ids[-1] == end_id != own_ids[-1]:
        found.append(
            f"the tokenizer puts {tokenizer.eos_token} after every text, so that all {num_prompts} prompts "
            "end with it, as in transformers: if completions should go on with the text, set add_eos_token "
            "to false in tokenizer_config.json, or take it out of the post_processor in tokenizer.json"
        )
    return found


def end_token_warnings(
    tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int], stops: Collection[str]
) -> list[str]:
    """A tokenizer's end token that ends nothing in a run with these end tokens and stop strings."""
    text, token_id = tokenizer.eos_token, tokenizer.eos_token_id
    if token_id is None or token_id in end_ids or text in stops:
        return []
    known = tokenizer.convert_ids_to_tokens(sorted(end_ids))
    return [
        f"the tokenizer's end token {text} ends no completion, as in transformers: the model's configuration "
        f"has {', '.join(map(str, known)) or 'none'}; to end at it, use --stop {shlex.quote(str(text))}, or "
        f"add {token_id} to eos_token_id in generation_config.json"
    ]
