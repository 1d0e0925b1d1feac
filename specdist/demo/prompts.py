"""Prompts of clearly different lengths, cut from held-out documents, each with how its document went on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from transformers import PreTrainedTokenizerFast

from specdist.demo.text import Document
from specdist.utils.errors import UserError

NUM_PROMPT_TOKENS = (12, 120, 24, 200, 48, 16, 160, 32, 90, 64)
NUM_REFERENCE_TOKENS = 64
PROMPTS_SCHEMA = pa.schema([("id", pa.int64()), ("prompt", pa.string()), ("reference", pa.string())])


def cut_prompts(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast, num_prompts: int
) -> pa.Table:
    """``num_prompts`` prompts, taken evenly from ``documents``, no text of them used twice.

    Raises :class:`UserError` if the documents are too short for so many.
    """
    pairs = [pair for document in documents for pair in _cut(document, tokenizer)]
    if len(pairs) < num_prompts:
        raise UserError(
            f"--num_prompts {num_prompts} is more than the {len(pairs)} available from the held-out "
            "documents of this Python's standard library: lower it, or use a Python with its complete "
            "standard library"
        )
    chosen = [pairs[index * len(pairs) // num_prompts] for index in range(num_prompts)]
    prompts, references = zip(*chosen, strict=True)
    return pa.table([range(num_prompts), prompts, references], schema=PROMPTS_SCHEMA)


def write_prompts(table: pa.Table, path: Path) -> None:
    """Write ``table`` as an Arrow IPC file."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def _cut(document: Document, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[str, str]]:
    """Prompts that begin with a section; lengths take turns, so that each has its share of every document."""
    text = document.text
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False, verbose=False)
    token_starts = [start for start, _ in encoded["offset_mapping"]]
    section_start, used_until, num_cut = 0, 0, 0
    for section in document.sections:
        if section_start >= used_until:
            num_prompt_tokens = NUM_PROMPT_TOKENS[num_cut % len(NUM_PROMPT_TOKENS)]
            prompt_end = _word_end(text, token_starts, section_start, num_prompt_tokens)
            end = prompt_end and _word_end(text, token_starts, prompt_end, NUM_REFERENCE_TOKENS)
            if not end:
                return
            yield text[section_start:prompt_end], text[prompt_end:end]
            used_until = end
            num_cut += 1
        section_start += len(section) + len("\n\n")


def _word_end(text: str, token_starts: list[int], position: int, num_tokens: int) -> int | None:
    """The first end of a word ``num_tokens`` or more after ``position``; None if the text ends before it.

    A text cut inside a word would not be read as the same tokens.
    """
    index = bisect_left(token_starts, position) + num_tokens
    while index < len(token_starts) and not text[token_starts[index]].isspace():
        index += 1
    return token_starts[index] if index < len(token_starts) else None
