"""The text of a completion: what its tokens add to the text of its prompt. No tensors.

A tokenizer may write a token otherwise where a text begins (those of Llama 2, Mistral and TinyLlama leave out
a space there), and a character may take several tokens. So a completion is decoded with the end of its prompt
before it, as vLLM and TGI do (``detokenize_incrementally``, ``decode_token``), and never token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

# Stands for bytes that are no character, or not yet.
NOT_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"
# A character has at most four bytes, so it begins at most so many tokens before one that it goes on in.
NUM_TOKENS_BEFORE = 3
# Tokens before a completion with which it is decoded, at least.
NUM_CONTEXT_TOKENS = 4


@dataclass(frozen=True)
class Detokenizer:
    """What makes text of one tokenizer's tokens.

    Attributes:
        decode: token ids to text; the second argument says whether special tokens are left out.
        special_ids: the special tokens.
        byte_ids: tokens that are single bytes. A decoder may write a run of them as one text, so that none is
            decoded without those before it (``ByteFallback`` in tokenizers).
    """

    decode: Callable[[list[int], bool], str]
    special_ids: frozenset[int] = frozenset()
    byte_ids: frozenset[int] = frozenset()
    # Whether a text may be cut before a token, and whether it has a text at all, by id.
    _begins: dict[int, bool] = field(default_factory=dict, compare=False, repr=False)
    _has_text: dict[int, bool] = field(default_factory=dict, compare=False, repr=False)

    def added(self, before_ids: list[int], token_ids: list[int], *, skip_special: bool = True) -> str:
        """What ``token_ids`` add to the text of ``before_ids``: the text of all less that of the first.

        Where they complete a character, or make bytes before them none, it begins with that character.
        """
        context = self.context(before_ids)
        known = self.decode(context, skip_special)
        text = self.decode(context + token_ids, skip_special)
        return text[common_length(known, text) :]

    def context(self, before_ids: list[int]) -> list[int]:
        """The last tokens, from one on where a text may be cut: what follows is written after them as after
        all of them."""
        begin = max(0, len(before_ids) - NUM_CONTEXT_TOKENS)
        while begin > 0 and not self._may_begin(before_ids[begin]):
            begin -= 1
        return before_ids[begin:]

    def _may_begin(self, token_id: int) -> bool:
        if token_id not in self._begins:
            is_plain = token_id not in self.special_ids and token_id not in self.byte_ids
            text = self.decode([token_id], True) if is_plain else ""
            self._begins[token_id] = bool(text) and not text.startswith(NOT_A_CHARACTER)
        return self._begins[token_id]

    def last_tokens(self, token_ids: list[int], num_bytes: int) -> list[int]:
        """The last tokens, at least so many that any text of ``num_bytes`` after them, or that ends in them,
        is written as after all: each token with a text has a byte or more."""
        begin, num_left = len(token_ids), num_bytes + NUM_TOKENS_BEFORE + 1
        while begin > 0 and num_left > 0:
            begin -= 1
            num_left -= self._is_written(token_ids[begin])
        return token_ids[begin:]

    def _is_written(self, token_id: int) -> bool:
        if token_id not in self._has_text:
            # Of two, since a decoder may leave out a space that a text begins with.
            self._has_text[token_id] = self.decode([token_id, token_id], False) != ""
        return self._has_text[token_id]

    def may_hold(self, token_ids: list[int], strings: tuple[str, ...]) -> bool:
        """Whether the end of a text may hold one of the strings, by its last tokens alone
        (:meth:`last_tokens`). They may begin inside a character, whose bytes can make all bytes after them
        none: so they are read from the next few tokens on as well."""
        for begin in range(NUM_TOKENS_BEFORE + 1):
            text = self.decode(token_ids[begin:], False)
            if first_stop(text, strings) is not None:
                return True
            if NOT_A_CHARACTER not in text:
                return False
        return False

    def until_stop(self, before_ids: list[int], token_ids: list[int], strings: tuple[str, ...]) -> str:
        """What ``token_ids`` add, up to the first stop string. Stop strings are looked for in the text with
        special tokens, and the text before one is returned without."""
        whole = self.added(before_ids, token_ids, skip_special=False) if strings else ""
        stop = first_stop(whole, strings)
        if stop is None:
            return self.added(before_ids, token_ids)
        # A stop string ends the completion, so few tokens of it are left out.
        count, known = len(token_ids), whole
        while len(known) > stop or not whole.startswith(known):
            count -= 1
            known = self.added(before_ids, token_ids[:count], skip_special=False)
        is_text = token_ids[count] not in self.special_ids
        return self.added(before_ids, token_ids[:count]) + (whole[len(known) : stop] if is_text else "")


def _nothing(token_ids: list[int], skip_special: bool) -> str:
    """A function with a name: what goes to another process is pickled."""
    return ""


# The detokenizer of sequences of which no text is wanted.
NO_TEXT = Detokenizer(_nothing)


def first_stop(text: str, strings: tuple[str, ...]) -> int | None:
    """Where the first of the strings begins."""
    found = [index for string in strings if (index := text.find(string)) >= 0]
    return min(found, default=None)


def common_length(first: str, second: str) -> int:
    """Characters with which both begin."""
    if second.startswith(first):
        return len(first)
    differing = (index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
    return next(differing, len(second))
