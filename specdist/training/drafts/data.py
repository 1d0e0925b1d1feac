"""What the target has said: the finished rows of a run, as examples for transformers' ``Trainer``.

An example is a dict of arrays over L tokens: ``input_ids``; ``labels``, which are ``IGNORED`` where a token
is not learned; and with recorded log-probabilities ``processed_logprobs`` [L], ``top_logprob_ids`` and
``top_logprobs`` [L, K]. Batches are padded on the right, which changes no logits of a causal model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdist.data.formats.prompts import Prompts, RowError
from specdist.data.run.reading import open_shard
from specdist.data.run.run_folder import RunFolder
from specdist.job.texts.tokens import PromptEncoder
from specdist.training.drafts.config import USUAL_PROMPTS, DistillConfig, Teacher
from specdist.utils.errors import UserError

COLUMNS = ("row_id", "sample_index", "finish_reason", "completion_ids")
LOGPROB_COLUMNS = ("processed_logprobs", "top_logprob_ids", "top_logprobs")
IGNORED = -100
# The smallest share of completions among the sequences of an epoch.
LEAST_SHARE = 0.25
Example = dict[str, np.ndarray]


@dataclass(frozen=True)
class Examples:
    """Completions for training and for evaluations, of different rows; and prompts to learn from."""

    training: list[Example]
    held_out: list[Example]
    prompts: list[Example]

    @property
    def learned(self) -> list[Example]:
        """What an epoch goes through: completions several times where prompts are many more, then these."""
        times = max(1, round(len(self.prompts) * LEAST_SHARE / (1 - LEAST_SHARE) / len(self.training)))
        return self.training * times + self.prompts

    def digest(self) -> str:
        """SHA-256 of all token ids."""
        parts = (self.training, self.held_out, self.prompts)
        return sha256(b"|".join(each["input_ids"].tobytes() for part in parts for each in part)).hexdigest()


def read_examples(
    folder: RunFolder, prompts: Prompts, encoder: PromptEncoder, config: DistillConfig, teacher: Teacher
) -> Examples:
    """Examples of the rows in complete shards. Raises :class:`UserError` if fewer than two are finished."""
    rows: list[dict[str, Any]] = []
    for shard in folder.complete_shards():
        table = open_shard(folder.paths(shard), verify=False)
        names = [name for name in LOGPROB_COLUMNS if teacher != "target" and name in table.column_names]
        rows += table.select([*COLUMNS, *names]).to_pylist()
    rows = [row for row in rows if row["finish_reason"] != "error" and row["completion_ids"]]
    rows = _spread(sorted(rows, key=lambda row: (row["row_id"], row["sample_index"])), config.max_sequences)
    row_ids = np.unique([row["row_id"] for row in rows])
    if len(row_ids) < 2:
        raise UserError(
            f"--run {folder.path} has fewer than 2 finished rows in complete shards to train on: generate "
            "more with jobs/generate.py"
        )
    num_held_out = min(len(row_ids) - 1, max(1, round(len(row_ids) * config.validation_share)))
    held_out = set(np.random.default_rng(config.seed).permutation(row_ids)[:num_held_out].tolist())
    found = Examples([], [], [])
    for row in rows:
        part = found.held_out if row["row_id"] in held_out else found.training
        if ids := _ids_of(prompts, encoder, row["row_id"]):
            part.append(_completion(ids, row))
    others = [row_id for row_id in range(prompts.num_rows) if row_id not in held_out]
    most = config.prompt_rows if config.prompt_rows is not None else USUAL_PROMPTS * (teacher == "target")
    texts = [_ids_of(prompts, encoder, row_id) for row_id in _spread(others, most)]
    found.prompts.extend(example(ids, 0) for ids in texts if len(ids) > 1)
    return found


def _ids_of(prompts: Prompts, encoder: PromptEncoder, row_id: int) -> Sequence[int]:
    try:
        return encoder.prompt_ids(prompts.prompt(row_id))
    except RowError:
        return []


def _completion(prompt_ids: Sequence[int], row: dict[str, Any]) -> Example:
    first = len(prompt_ids)
    found = example([*prompt_ids, *row["completion_ids"]], first)
    for name in LOGPROB_COLUMNS:
        if name in row:
            values = np.array(row[name])
            found[name] = np.concatenate([np.zeros((first, *values.shape[1:]), values.dtype), values])
    return found


def example(ids: Sequence[int], first: int) -> Example:
    """A sequence that is learned from its token ``first`` on."""
    found = np.array(ids, np.int64)
    return {"input_ids": found, "labels": np.where(np.arange(len(ids)) < first, IGNORED, found)}


def collate(examples: Sequence[Example]) -> dict[str, Tensor]:
    """A batch of examples."""
    found = {name: [torch.from_numpy(each[name]) for each in examples] for name in examples[0]}
    return {name: padded(parts, IGNORED if name == "labels" else 0) for name, parts in found.items()}


def padded(parts: Sequence[Tensor], value: int, side: str = "right") -> Tensor:
    """[B, L, ...]"""
    return pad_sequence(list(parts), batch_first=True, padding_value=value, padding_side=side)


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    step = max(1.0, len(items) / max(1, most))
    return [items[int(index * step)] for index in range(min(len(items), most))]
