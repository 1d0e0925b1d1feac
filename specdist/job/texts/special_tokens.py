"""Special tokens in the text of prompts, encoded as the text that they are.

A tokenizer encodes ``<|eot_id|>`` as the control token wherever it stands, also in a user's text. With
``--split_special_tokens`` (as in transformers' tokenizers) it becomes ordinary tokens there. The special
tokens of a chat template stay special: before the template is applied, those in the messages are replaced by
stand-ins, and after it those of the template by aliases, which are tokens of a copy of the tokenizer that
splits all special tokens. So the text is encoded in one piece, as without the option.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from specdist.data.formats.prompts import RowError

# Private-use characters: one for every special token, in the messages and in the template's text.
FIRST_STAND_IN, FIRST_ALIAS = 0x100000, 0x108000


class SpecialTokenSplitter:
    """Encodes texts with a copy of a fast tokenizer, where only a template's special tokens are special."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        special = {
            token_id: token for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        contents = [token.content for token in special.values()]
        self._stand_ins = {content: chr(FIRST_STAND_IN + index) for index, content in enumerate(contents)}
        self._aliases = {content: chr(FIRST_ALIAS + index) for index, content in enumerate(contents)}
        # The longest first, as a tokenizer matches them.
        self._special = _any_of(sorted(contents, key=len, reverse=True))
        self._reserved = _any_of([*self._stand_ins.values(), *self._aliases.values()])
        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.add_tokens(
            [
                AddedToken(
                    self._aliases[token.content],
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=False,
                    special=False,
                )
                for token in special.values()
            ]
        )
        self._backend.encode_special_tokens = True
        self._id_of_alias = {
            self._backend.token_to_id(self._aliases[token.content]): token_id
            for token_id, token in special.items()
        }

    def check(self, prompt: str | list[dict[str, Any]]) -> None:
        """Raises :class:`RowError` for a text with the characters of stand-ins or aliases."""

        def check_text(text: str) -> str:
            found = self._reserved.search(text)
            if found:
                raise RowError(
                    f"the prompt has the private-use character U+{ord(found[0]):X}, which "
                    "--split_special_tokens reserves"
                )
            return text

        _mapped(prompt, check_text)

    def hidden(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with stand-ins for the special tokens in their texts."""
        replaced: list[dict[str, Any]] = _mapped(
            messages, lambda text: self._special.sub(lambda found: self._stand_ins[found[0]], text)
        )
        return replaced

    def shown(self, text: str) -> str:
        """The text with the special tokens in place of their stand-ins."""
        for content, stand_in in self._stand_ins.items():
            text = text.replace(stand_in, content)
        return text

    def text_ids(self, text: str) -> list[int]:
        """Tokens of a plain prompt: the tokenizer adds its special tokens, and finds none in the text."""
        return list(self._backend.encode(text, add_special_tokens=True).ids)

    def chat_ids(self, text: str) -> list[int]:
        """Tokens of a template's text with stand-ins: only the template's own tokens are special."""
        aliased = self._special.sub(lambda found: self._aliases[found[0]], text)
        ids = self._backend.encode(self.shown(aliased), add_special_tokens=False).ids
        return [self._id_of_alias.get(token_id, token_id) for token_id in ids]


def _any_of(texts: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """All texts of a value, nested ones included, changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {name: _mapped(item, change) for name, item in value.items()}
    return value
