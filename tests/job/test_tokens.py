"""Texts in a target's tokens."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import cast

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from specdist.data.formats.prompts import open_prompts
from specdist.engine.request import Completion, Request
from specdist.job.rows.output_columns import ThinkingColumns
from specdist.job.texts import constraints, processing
from specdist.job.texts.constraints import thinking_markers
from specdist.job.texts.tokens import (
    MOST_PROMPTS,
    added_token_warnings,
    detokenizer_of,
    ids_within,
)
from specdist.models.files.checkpoint import Checkpoint
from specdist.sampling.constraints.masker import ThinkingMarkers
from tests.data.test_batches import write
from tests.detokenizers import byte_level, llama, plain
from tests.job.pair import write_arrow


def test_a_text_inside_another_has_no_space_that_a_tokenizer_puts_where_one_begins() -> None:
    """As Llama 2's does."""
    for tokenizer in (llama(), byte_level()):
        before_ids = tokenizer("a", add_special_tokens=False)["input_ids"]
        for text in ("a", " a", "  a", "\nb\n", "你", ""):
            assert plain(tokenizer, before_ids, ids_within(tokenizer, text), skip_special=False) == text
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


def test_thinking_and_answer_are_texts_after_what_stands_before_them() -> None:
    tokenizer = llama()
    names = ["a", "▁the", "▁sky", "\n", "▁is", "▁END", "<|mark|>", "a"]
    a, the, sky, line, *answer = tokenizer.convert_tokens_to_ids(names)
    columns = ThinkingColumns(ThinkingMarkers((), (line,)), detokenizer_of(tokenizer), ("<|mark",))
    request = Request(row_id=0, sample_index=0, prompt_ids=[a])
    said = Completion(
        request=request, token_ids=[the, sky, line, *answer], text="", finish_reason="stop",
        num_spec_steps=0, num_draft_tokens=0, num_accepted_draft_tokens=0,
    )  # fmt: skip
    assert columns.of(said) == {"completion_thinking": " the sky", "completion_answer": " is END"}


def with_tokens_around(around: str) -> PreTrainedTokenizerFast:
    """Llama 2's, with special tokens around every text ``$A``."""
    tokenizer = copy.deepcopy(llama())
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=around,
        special_tokens=[(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "</s>")],
    )
    return tokenizer


def test_a_second_token_of_the_beginning_is_told_with_the_number_of_its_prompts(tmp_path: Path) -> None:
    """Prompts stay as in transformers. Nothing is said of tokenizers that add nothing, and of chats."""
    texts = ["<s>a", "a", None, " <s>a", "<s>", ""]
    prompts = open_prompts(
        str(write_arrow(tmp_path / "a.arrow", {"prompt": texts})), prompt_column="prompt",
        messages_column=None, limit=None,
    )  # fmt: skip
    tokenizer = with_tokens_around("<s> $A")
    assert tokenizer("<s>a")["input_ids"][:2] == [tokenizer.bos_token_id] * 2
    (told,) = added_token_warnings(tokenizer, 6, prompts.num_beginning_with)
    assert told.startswith("2 of 6 prompts begin with <s>") and "twice, as in transformers" in told
    asked: list[int] = []
    (told,) = added_token_warnings(tokenizer, 10**6, lambda _, most: asked.append(most) or 3)
    assert asked == [MOST_PROMPTS] and told.startswith(f"3 of the first {MOST_PROMPTS} prompts")
    (told,) = added_token_warnings(with_tokens_around("$A </s>"), 6, prompts.num_beginning_with)
    assert "puts </s> after every text, so that all 6 prompts end with it" in told
    assert not added_token_warnings(llama(), 6, prompts.num_beginning_with)
    bodies = [{"prompt": "<s>a"}, {"prompt": "a"}, {"prompt": 5}]
    options = {"prompt_column": "body", "messages_column": None, "limit": None}
    batch = open_prompts(str(write(tmp_path / "b.jsonl", bodies, url="/v1/completions")), **options)
    assert batch.num_beginning_with("<s>", 3) == 1
    chat = [{"messages": [{"role": "user", "content": "<s>"}]}]
    (tmp_path / "c.jsonl").write_text(json.dumps(chat[0]) + "\n")
    options = {"prompt_column": None, "messages_column": "messages", "limit": None}
    assert open_prompts(str(tmp_path / "c.jsonl"), **options).num_beginning_with("<s>", 1) == 0
