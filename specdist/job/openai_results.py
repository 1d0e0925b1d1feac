"""OpenAI's batch format out: a result per request of :mod:`specdist.data.batches`, in their order.

The format: https://platform.openai.com/docs/guides/batch. The tokens of log-probabilities are decoded one by
one; of one that is a part of a character, ``bytes`` is null.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from specdist.data import RunFolder
from specdist.data.batches import CHAT_URL, REQUEST_KEYS, num_logprobs_of
from specdist.data.files import write_atomically
from specdist.data.merging import check_output, verified_tables
from specdist.job.tokens import load_tokenizer
from specdist.models.checkpoint import open_checkpoint
from specdist.utils.errors import UserError

# The end of a text whose last character lacks tokens.
UNFINISHED = "\ufffd"
# Rows that are Python objects at a time.
ROWS_PER_PIECE = 256
NEEDED = (
    "completion", "completion_ids", "finish_reason", "error", "num_prompt_tokens", "num_completion_tokens",
)  # fmt: skip
OPTIONAL = (
    "logprobs", "top_logprob_ids", "top_logprobs", "prompt", "prompt_ids", "prompt_logprobs",
    "top_prompt_logprob_ids", "top_prompt_logprobs", "completion_thinking", "completion_answer",
)  # fmt: skip


def write_results(folder: RunFolder, output: Path, *, overwrite: bool = False) -> int:
    """Write a line for each request of a complete run, every shard verified; returns their number.

    Raises :class:`UserError` as :func:`specdist.data.merging.merge_run` does, if the prompts were no
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


class _Results:
    """Of one run."""

    def __init__(self, folder: RunFolder) -> None:
        manifest = folder.manifest
        self._model = str(manifest.info.get("target"))
        self._trusts_code = bool(manifest.fingerprint.get("trust_remote_code"))
        # The same run gives the same file.
        self._created = int(folder.manifest_path.stat().st_mtime)
        self._tag = str(manifest.fingerprint.get("prompts"))[:12]
        self._texts: dict[int, str] = {}
        self._tokenizer: Any = None

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
        body = self._failure(reason) if reason is not None else self._answer(rows, name)
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

    def _failure(self, reason: str) -> dict[str, Any]:
        return {"error": {"message": reason, "type": "invalid_request_error", "param": None, "code": None}}

    def _answer(self, rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
        is_chat = rows[0]["url"] == CHAT_URL
        asked = json.loads(rows[0]["body"])
        num_logprobs = num_logprobs_of(asked, is_chat=is_chat)
        num_of_prompt = asked.get("prompt_logprobs")
        if asked.get("echo"):
            rows = [_echoed(row) for row in rows]
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
                    "logprobs": None if num_logprobs is None else self._logprobs(row, num_logprobs, is_chat),
                    **({} if num_of_prompt is None else self._of_prompt(row, num_of_prompt)),
                }
                for index, row in enumerate(rows)
            ],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_completion,
                "total_tokens": num_prompt + num_completion,
            },
        }

    def _logprobs(self, row: Mapping[str, Any], num_top: int, is_chat: bool) -> dict[str, Any]:
        """Of all tokens but the end token, and of the likeliest that the request asks for."""
        ids, values = row["completion_ids"], row["logprobs"]
        if row["finish_reason"] == "stop" and ids and self._is_special(ids[-1]):
            ids, values = ids[:-1], values[:-1]
        top = [
            None if top_ids is None else list(zip(top_ids[:num_top], found[:num_top], strict=True))
            for top_ids, found in zip(row["top_logprob_ids"], row["top_logprobs"], strict=True)
        ][: len(ids)]
        if is_chat:
            return {
                "content": [
                    {**self._token(*item), "top_logprobs": [self._token(*other) for other in others or ()]}
                    for item, others in zip(zip(ids, values, strict=True), top, strict=True)
                ]
            }
        return {
            "text_offset": self._offsets(ids),
            "tokens": [self._token_text(token_id) for token_id in ids],
            "token_logprobs": values,
            "top_logprobs": [
                None if others is None else {self._token_text(token_id): value for token_id, value in others}
                for others in top
            ],
        }

    def _of_prompt(self, row: Mapping[str, Any], num_top: int) -> dict[str, Any]:
        """As vLLM writes them: of every token but the first, its own and the likeliest, by token id."""
        lines = zip(
            row["prompt_ids"],
            row["prompt_logprobs"],
            row["top_prompt_logprob_ids"],
            row["top_prompt_logprobs"],
            strict=True,
        )
        found: list[dict[str, Any] | None] = []
        for token_id, value, top_ids, top in lines:
            if value is None:
                found.append(None)
                continue
            known = {token_id: value} | dict(zip(top_ids[:num_top], top[:num_top], strict=True))
            found.append(
                {
                    str(each): {"logprob": logprob, "decoded_token": self._token_text(each)}
                    for each, logprob in known.items()
                }
            )
        return {"prompt_logprobs": found}

    def _offsets(self, ids: list[int]) -> list[int]:
        """Where each token begins in the text that all make. A token that is a part of a character begins
        where the character does."""
        decode = partial(self._load().decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        found: list[int] = []
        # Of whole characters, with those before them: a tokenizer may write a text's first token otherwise.
        before: list[int] = []
        own: list[int] = []
        length, begin = 0, 0
        for token_id in ids:
            found.append(length)
            own.append(token_id)
            text = str(decode(before + own))
            if not text.endswith(UNFINISHED):
                length += len(text) - begin
                if len(own) > 1 and UNFINISHED not in (whole := self._token_text(token_id)):
                    # After bytes that are not a character.
                    found[-1] = length - len(whole)
                before, own = own, []
                begin = len(str(decode(before)))
        return found

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token_id)
        return {
            "token": text,
            "logprob": logprob,
            "bytes": None if UNFINISHED in text else list(text.encode()),
        }

    def _load(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(
                open_checkpoint("the run's --target", self._model, trust_remote_code=self._trusts_code)
            )
        return self._tokenizer

    def _is_special(self, token_id: int) -> bool:
        return token_id in self._load().all_special_ids

    def _token_text(self, token_id: int) -> str:
        if token_id not in self._texts:
            self._texts[token_id] = str(self._load().decode([token_id], clean_up_tokenization_spaces=False))
        return self._texts[token_id]


def _echoed(row: Mapping[str, Any]) -> dict[str, Any]:
    """With the prompt before the completion, in its text and its log-probabilities."""
    found = {**row, "completion": row["prompt"] + row["completion"]}
    if row.get("prompt_ids") is not None and row.get("logprobs") is not None:
        pairs = {
            "completion_ids": "prompt_ids",
            "logprobs": "prompt_logprobs",
            "top_logprob_ids": "top_prompt_logprob_ids",
            "top_logprobs": "top_prompt_logprobs",
        }
        found |= {name: [*row[of_prompt], *row[name]] for name, of_prompt in pairs.items()}
    return found


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
