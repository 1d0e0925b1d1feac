"""Texts in a target's tokens."""

from __future__ import annotations

from typing import cast

import pytest

from specdist.job import constraints, processing
from specdist.job.constraints import thinking_markers
from specdist.job.tokens import PromptEncoder, ids_within
from specdist.models.checkpoint import Checkpoint
from tests.detokenizers import byte_level, llama, plain


def test_a_text_inside_another_has_no_space_that_a_tokenizer_puts_where_one_begins() -> None:
    """As Llama 2's does."""
    for tokenizer in (llama(), byte_level()):
        before_ids = tokenizer("a", add_special_tokens=False)["input_ids"]
        for text in ("a", " a", "  a", "\nb\n", "你", ""):
            assert plain(tokenizer, before_ids, ids_within(tokenizer, text), skip_special=False) == text
            found = PromptEncoder(tokenizer, max_prompt_tokens=9).continuation_ids(text)
            assert found == ids_within(tokenizer, text)
    tokenizer = llama()
    assert tokenizer.convert_ids_to_tokens(ids_within(tokenizer, "a b")) == ["a", "▁", "b"]
    assert tokenizer("a", add_special_tokens=False)["input_ids"] != ids_within(tokenizer, "a")


def test_texts_of_options_are_looked_for_inside_a_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of thinking, and words that are not to be said: alone and after a space."""
    tokenizer, target = llama(), cast(Checkpoint, None)
    for module in (constraints, processing):
        monkeypatch.setattr(module, "load_tokenizer", lambda _: tokenizer)
    a, space, b, line = tokenizer.convert_tokens_to_ids(["a", "▁", "b", "\n"])
    markers = thinking_markers(target, "\nb", "max_thinking_tokens")
    assert markers.end_ids == (line, b)
    assert processing._bad_words(["a"], target) == ((a,), (space, a))
