"""What the target has said: finished rows of a run as token ids, and batches of them.

B sequences of a batch, L tokens of the longest, M positions before tokens of completions, K recorded tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from specdist.config.generate import GenerateConfig
from specdist.data.formats.prompts import Prompts, RowError
from specdist.data.run.reading import open_shard
from specdist.data.run.run_folder import RunFolder
from specdist.job.texts.tokens import PromptEncoder
from specdist.sampling.keys import stream_key
from specdist.training.drafts.acceptance import Places
from specdist.utils.errors import UserError

COLUMNS = ("row_id", "sample_index", "finish_reason", "completion_ids")
LOGPROB_COLUMNS = ("processed_logprobs", "top_logprob_ids", "top_logprobs")
LEAST_ROWS = 2
# Of the completions among the sequences of an epoch.
LEAST_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Example:
    """A completion after its prompt.

    Attributes:
        processed_N: log-probability of every token in the distribution that it was drawn from.
        top_ids_NK, top_logs_NK: the likeliest tokens before processing; all three are None without
            ``--logprobs``.
    """

    row_id: int
    sample_index: int
    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    processed_N: np.ndarray | None = None
    top_ids_NK: np.ndarray | None = None
    top_logs_NK: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def token_ids(self) -> np.ndarray:
        return np.concatenate([self.prompt_ids, self.completion_ids])


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences of one pass, filled up at their ends; what comes after a token does not change its logits.

    Attributes:
        token_ids_BL: int64; what follows a sequence's last token has no effect.
        rows_M, columns_M: the place of the token before each of the completions' tokens.
        places: of the completions' tokens.
        lengths: tokens of every completion.
        top_ids_MK, top_logs_MK: what the run has recorded.
    """

    token_ids_BL: Tensor
    rows_M: Tensor
    columns_M: Tensor
    places: Places
    lengths: tuple[int, ...]
    top_ids_MK: Tensor | None
    top_logs_MK: Tensor | None


def num_completion_tokens(examples: Sequence[Example]) -> int:
    return sum(len(example.completion_ids) for example in examples)


@dataclass(frozen=True)
class Examples:
    """For training, and for evaluations: no row is in both. ``prompts``: texts that are learned from at
    every place but the first, beside the completions."""

    training: list[Example]
    held_out: list[Example]
    prompts: list[Example] = field(default_factory=list)

    @property
    def learned(self) -> list[Example]:
        """What an epoch goes through: completions several times where prompts are many more, then these."""
        times = max(1, round(len(self.prompts) * LEAST_SHARE / (1 - LEAST_SHARE) / len(self.training)))
        return self.training * times + self.prompts

    def digest(self) -> str:
        """SHA-256 of all tokens."""
        found = hashlib.sha256()
        for part in (self.training, self.held_out, *([self.prompts] if self.prompts else [])):
            for example in part:
                found.update(f"{example.row_id} {example.sample_index} {len(example.prompt_ids)} ".encode())
                found.update(example.prompt_ids.tobytes() + example.completion_ids.tobytes())
            found.update(b"end of part")
        return found.hexdigest()


def read_examples(
    folder: RunFolder, prompts: Prompts, encoder: PromptEncoder, *, max_sequences: int, reads_logprobs: bool
) -> list[Example]:
    """The finished completions of a run, or so many spread over them, in the order of the rows.

    Raises :class:`UserError` if there are none, or without the log-probabilities that are wanted.
    """
    found = sorted(_completions(folder, reads_logprobs), key=lambda row: (row["row_id"], row["sample_index"]))
    if len({row["row_id"] for row in found}) < LEAST_ROWS:
        raise UserError(
            f"--output {folder.path} has fewer than {LEAST_ROWS} finished rows to train on: generate some "
            "with jobs/generate.py, or give --first 0.05 to generate them here"
        )
    step = max(1.0, len(found) / max_sequences)
    chosen = [found[int(index * step)] for index in range(min(len(found), max_sequences))]
    examples = []
    for row in chosen:
        prompt_ids = _prompt_ids(prompts, encoder, row["row_id"])
        if prompt_ids is not None:
            examples.append(_example(row, prompt_ids, reads_logprobs))
    return examples


def read_prompts(
    prompts: Prompts, encoder: PromptEncoder, held_out: Sequence[Example], *, num_rows: int, max_tokens: int
) -> list[Example]:
    """So many rows' prompts, spread over all but those that are held out, as texts to learn from after their
    first token; the first ``max_tokens`` tokens of each."""
    not_learned = {example.row_id for example in held_out}
    row_ids = [row_id for row_id in range(prompts.num_rows) if row_id not in not_learned]
    step = max(1.0, len(row_ids) / max(1, num_rows))
    texts = []
    for index in range(min(len(row_ids), num_rows)):
        row_id = row_ids[int(index * step)]
        ids = np.array(_prompt_ids(prompts, encoder, row_id) or [], np.int32)[:max_tokens]
        if len(ids) > 1:
            text = Example(row_id=row_id, sample_index=0, prompt_ids=ids[:1], completion_ids=ids[1:])
            texts.append(text)
    return texts


def _prompt_ids(prompts: Prompts, encoder: PromptEncoder, row_id: int) -> Sequence[int] | None:
    """None of a row that cannot be used."""
    try:
        return encoder.prompt_ids(prompts.prompt(row_id))
    except RowError:
        return None


def split_examples(examples: Sequence[Example], validation_share: float, seed: int) -> Examples:
    """Hold out a share of the rows, at least one and not all, with all completions of each."""
    row_ids = np.unique([example.row_id for example in examples])
    num_held_out = min(len(row_ids) - 1, max(1, round(len(row_ids) * validation_share)))
    held_out = set(np.random.default_rng(seed).permutation(row_ids)[:num_held_out].tolist())
    return Examples(
        [example for example in examples if example.row_id not in held_out],
        [example for example in examples if example.row_id in held_out],
    )


def batches(
    examples: Sequence[Example], max_tokens: int, config: GenerateConfig, device: torch.device
) -> Iterator[tuple[list[int], Batch]]:
    """All of the examples in passes of at most ``max_tokens`` tokens, padding included, unless one alone is
    longer; with the index of each. Those of like length share a pass."""
    order = sorted(range(len(examples)), key=lambda index: -examples[index].num_tokens)
    while order:
        size = max(1, max_tokens // examples[order[0]].num_tokens)
        chosen, order = order[:size], order[size:]
        yield chosen, make_batch([examples[index] for index in chosen], config, device)


def make_batch(examples: Sequence[Example], config: GenerateConfig, device: torch.device) -> Batch:
    """One pass over these examples."""
    longest = max(example.num_tokens for example in examples) - 1
    token_ids_BL = np.zeros((len(examples), longest), np.int64)
    rows, columns, keys, positions = [], [], [], []
    for row, example in enumerate(examples):
        ids = example.token_ids[:-1]
        token_ids_BL[row, : len(ids)] = ids
        places_N = np.arange(len(example.prompt_ids), example.num_tokens)
        rows.append(np.full(len(places_N), row))
        columns.append(places_N - 1)
        positions.append(places_N)
        key = stream_key(config.seed, example.row_id, example.sample_index)
        keys.append(np.full(len(places_N), key, np.int64))

    def joined(arrays: Sequence[np.ndarray | None]) -> Tensor | None:
        if any(array is None for array in arrays):
            return None
        return torch.from_numpy(np.concatenate([array for array in arrays if array is not None])).to(device)

    def ids_of(arrays: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(np.int64)).to(device)

    processed_M = joined([example.processed_N for example in examples])
    return Batch(
        token_ids_BL=torch.from_numpy(token_ids_BL).to(device),
        rows_M=ids_of(rows),
        columns_M=ids_of(columns),
        places=Places(
            token_ids_M=ids_of([example.completion_ids for example in examples]),
            stream_keys_M=ids_of(keys),
            positions_M=ids_of(positions),
            probabilities_M=None if processed_M is None else processed_M.double().exp(),
        ),
        lengths=tuple(len(example.completion_ids) for example in examples),
        top_ids_MK=joined([example.top_ids_NK for example in examples]),
        top_logs_MK=joined([example.top_logs_NK for example in examples]),
    )


def _completions(folder: RunFolder, reads_logprobs: bool) -> Iterator[dict[str, Any]]:
    """Of complete shards, and of those that are begun."""
    names = [*COLUMNS, *(LOGPROB_COLUMNS if reads_logprobs else ())]
    complete = folder.complete_shards()
    for shard in complete:
        table = open_shard(folder.paths(shard), verify=False)
        yield from _usable(_columns(table, names, folder))
    for shard in sorted(set(folder.begun_shards()) - set(complete)):
        rows = folder.part_rows(shard)
        yield from _usable([{name: getattr(row, name) for name in names} for row in rows])


def _columns(table: pa.Table, names: Sequence[str], folder: RunFolder) -> list[dict[str, Any]]:
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise UserError(
            f"--output {folder.path} has no column {missing[0]}: it was generated without --logprobs; use "
            "--teacher target"
        )
    rows: list[dict[str, Any]] = table.select(list(names)).to_pylist()
    return rows


def _usable(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (row for row in rows if row["finish_reason"] != "error" and row["completion_ids"])


def _example(row: dict[str, Any], prompt_ids: Sequence[int], reads_logprobs: bool) -> Example:
    found: dict[str, np.ndarray] = {}
    if reads_logprobs:
        found = {
            "processed_N": np.array(row["processed_logprobs"], np.float32),
            "top_ids_NK": np.array(row["top_logprob_ids"], np.int64),
            "top_logs_NK": np.array(row["top_logprobs"], np.float32),
        }
    return Example(
        row_id=row["row_id"],
        sample_index=row["sample_index"],
        prompt_ids=np.array(prompt_ids, np.int32),
        completion_ids=np.array(row["completion_ids"], np.int32),
        **found,
    )
