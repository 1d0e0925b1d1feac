"""OpenAI's batch format out: a result per request of :mod:`specdist.data.formats.batches`, in their order.

The format: https://platform.openai.com/docs/guides/batch. The texts of the tokens of log-probabilities are
together the completion. A character is the text of the last token that it needs; special tokens, which a
completion does not show, have their own texts, and ``bytes`` is null.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from specdist.data.formats.batches import CHAT_URL, REQUEST_KEYS, num_logprobs_of
from specdist.data.run.merging import check_output, verified_tables
from specdist.data.run.run_folder import RunFolder
from specdist.data.store.files import write_atomically
from specdist.engine.schedule.detokenizer import NOT_A_CHARACTER, Detokenizer
from specdist.job.texts.token_texts import TokenTexts
from specdist.job.texts.tokens import detokenizer_of, load_tokenizer
from specdist.models.files.checkpoint import open_checkpoint
from specdist.utils.errors import UserError

# Characters at the end of a prompt that decide how the completion after it is written.
NUM_CONTEXT_CHARACTERS = 100
# Rows that are Python objects at a time.
ROWS_PER_PIECE = 256
NEEDED = (
    "completion", "completion_ids", "finish_reason", "error", "num_prompt_tokens", "num_completion_tokens",
)  # fmt: skip
OPTIONAL = (
    "logprobs", "top_logprob_ids", "top_logprobs", "prompt", "completion_thinking", "completion_answer",
)  # fmt: skip


def write_results(folder: RunFolder, output: Path, *, overwrite: bool = False) -> int:
    """Write a line for each request of a complete run, every shard verified; returns their number.

    Raises :class:`UserError` as :func:`specdist.data.run.merging.merge_run` does, if the prompts were no
    requests, and if log-probabilities need a tokenizer that cannot be loaded.
    """
    check_output(output, (".jsonl",), overwrite=overwrite)
    results = _Results(folder)
    tables = verified_tables(folder)
    num_written = 0

    def lines() -> Iterator[bytes]:
        nonlocal num_written
        for table in tables:
            for line in results.of(table):
                num_written += 1
                yield (json.dumps(line, ensure_ascii=False) + "\n").encode()

    write_atomically(output, lambda file: file.writelines(lines()))
    return num_written


@dataclass(frozen=True)
class _Token:
    """A token, or another in its place."""

    text: str
    is_special: bool
    logprob: float

    def of_chat(self) -> dict[str, Any]:
        is_text = bool(self.text) and not self.is_special and NOT_A_CHARACTER not in self.text
        return {
            "token": self.text,
            "logprob": self.logprob,
            "bytes": list(self.text.encode()) if is_text else None,
        }


@dataclass(frozen=True)
class _Place:
    """A token of a text, where it begins, and the likeliest in its place."""

    token: _Token
    offset: int
    top: Sequence[_Token]

    @property
    def num_characters(self) -> int:
        """The token's characters in the completion, which shows no special tokens."""
        return 0 if self.token.is_special else len(self.token.text)


class _Results:
    """The results of one run."""

    def __init__(self, folder: RunFolder) -> None:
        manifest = folder.manifest
        self._model = str(manifest.info.get("target"))
        self._trusts_code = bool(manifest.fingerprint.get("trust_remote_code"))
        # The same run gives the same file.
        self._created = int(folder.manifest_path.stat().st_mtime)
        self._tag = str(manifest.fingerprint.get("prompts"))[:12]

    def of(self, table: pa.Table) -> Iterator[dict[str, Any]]:
        """The results of the requests of a shard. Raises :class:`UserError`."""
        missing = [name for name in REQUEST_KEYS if name not in table.column_names]
        if missing:
            raise UserError(
                f"--format openai needs a run over requests of OpenAI's batch format, and this one has no "
                f"column {', '.join(missing)}: leave it out, or generate from such a file"
            )
        names = [*REQUEST_KEYS, *NEEDED, "row_id", *(name for name in OPTIONAL if name in table.column_names)]
        table = table.select(names)
        rows = (
            row
            for start in range(0, table.num_rows, ROWS_PER_PIECE)
            for row in table.slice(start, ROWS_PER_PIECE).to_pylist()
        )
        for _, samples in groupby(rows, key=lambda row: row["row_id"]):
            yield self._result(list(samples))

    def _result(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        request, name = rows[0], f"{self._tag}_{rows[0]['row_id']}"
        reason = next((row["error"] for row in rows if row["finish_reason"] == "error"), None)
        error = {"message": reason, "type": "invalid_request_error", "param": None, "code": None}
        body = {"error": error} if reason is not None else self._answer(rows, name)
        return {
            "id": f"batch_req_{name}",
            "custom_id": request["custom_id"],
            "response": {
                "status_code": 200 if reason is None else 400,
                "request_id": f"req_{name}",
                "body": body,
            },
            "error": None if reason is None else {"code": "invalid_request", "message": reason},
        }

    def _answer(self, rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
        is_chat = rows[0]["url"] == CHAT_URL
        asked = json.loads(rows[0]["body"])
        num_logprobs = num_logprobs_of(asked, is_chat=is_chat)
        num_prompt = rows[0]["num_prompt_tokens"]
        num_completion = sum(row["num_completion_tokens"] for row in rows)
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [
                {
                    "index": index,
                    **_text(row, is_chat=is_chat),
                    "finish_reason": row["finish_reason"],
                    "logprobs": None
                    if num_logprobs is None
                    else self._logprobs(row, num_logprobs, is_chat=is_chat),
                }
                for index, row in enumerate(rows)
            ],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_completion,
                "total_tokens": num_prompt + num_completion,
            },
        }

    def _logprobs(self, row: Mapping[str, Any], num_top: int, *, is_chat: bool) -> dict[str, Any]:
        """Log-probabilities of all tokens but those of the end, and of the likeliest that the request asks
        for."""
        places = self._of_completion(row, num_top)
        if is_chat:
            return {
                "content": [
                    {**place.token.of_chat(), "top_logprobs": [other.of_chat() for other in place.top]}
                    for place in places
                ]
            }
        return {
            "text_offset": [place.offset for place in places],
            "tokens": [place.token.text for place in places],
            "token_logprobs": [place.token.logprob for place in places],
            "top_logprobs": [{other.text: other.logprob for other in place.top} for place in places],
        }

    def _of_completion(self, row: Mapping[str, Any], num_top: int) -> list[_Place]:
        ids = row["completion_ids"]
        texts = TokenTexts(self._detokenizer, self._ids_before(row), ids)
        places = self._places(
            texts, ids, row["logprobs"], row["top_logprob_ids"], row["top_logprobs"], num_top
        )
        if row["finish_reason"] == "stop" and places and places[-1].token.is_special:
            places.pop()
        # A stop string is not part of the completion.
        end = len(row["completion"])
        for index, place in enumerate(places):
            if place.offset + place.num_characters > end:
                kept = places[:index]
                if place.offset < end:
                    token = replace(place.token, text=place.token.text[: end - place.offset])
                    kept.append(replace(place, token=token))
                return kept
        return places

    def _places(
        self,
        texts: TokenTexts,
        ids: list[int],
        values: list[float],
        top_ids: list[list[int]],
        top_values: list[list[float]],
        num_top: int,
    ) -> list[_Place]:
        """Where each of the tokens begins in the text that all make."""
        special_ids = self._detokenizer.special_ids

        def token(index: int, token_id: int, value: float) -> _Token:
            is_special = token_id in special_ids
            text = self._detokenizer.decode([token_id], False) if is_special else texts.other(index, token_id)
            return _Token(text, is_special, value)

        found, offset = [], 0
        for index, (token_id, value) in enumerate(zip(ids, values, strict=True)):
            others = zip(top_ids[index][:num_top], top_values[index][:num_top], strict=True)
            top = [token(index, *each) for each in others]
            found.append(_Place(token(index, token_id, value), offset, top))
            offset += found[-1].num_characters
        return found

    def _ids_before(self, row: Mapping[str, Any]) -> list[int]:
        """Tokens that end the prompt as its own do."""
        text = row["prompt"][-NUM_CONTEXT_CHARACTERS:]
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @cached_property
    def _tokenizer(self) -> Any:
        checkpoint = open_checkpoint("the run's --target", self._model, trust_remote_code=self._trusts_code)
        return load_tokenizer(checkpoint)

    @cached_property
    def _detokenizer(self) -> Detokenizer:
        return detokenizer_of(self._tokenizer)


def _text(row: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any]:
    if not is_chat:
        return {"text": row["completion"]}
    if "completion_answer" not in row:
        return {"message": {"role": "assistant", "content": row["completion"]}}
    return {
        "message": {
            "role": "assistant",
            "content": row["completion_answer"],
            "reasoning_content": row["completion_thinking"],
        }
    }
