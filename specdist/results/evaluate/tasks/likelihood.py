"""The target's mean log-likelihood of the completions per token, in nats.

The distribution is the softmax of the target's float32 logits, without the run's temperature and filters. The
stop token counts, since it was emitted.

R rows of a pass, L longest of them in tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from specdist.job.ranks.topology import local_device
from specdist.job.texts.tokens import load_tokenizer
from specdist.models.files.checkpoint import Checkpoint, open_checkpoint
from specdist.results.evaluate.config import EvaluateConfig
from specdist.results.evaluate.reading import Completions
from specdist.results.evaluate.scores import Groups, Metric, Scores
from specdist.results.evaluate.tasks.texts import ERROR, IDENTITY_COLUMNS, identity_columns
from specdist.utils.errors import UserError


@dataclass(frozen=True)
class TokenRow:
    """The tokens of a prompt and, from ``start`` on, of its completion."""

    token_ids: list[int]
    start: int


def score_likelihood(completions: Completions, config: EvaluateConfig) -> Scores:
    """Score all rows with tokens; the others, such as errors, do not count.

    Raises :class:`UserError` if the model's tokenizer is not the run's, or no row has a token.
    """
    assert config.model is not None
    if "turn_completions" in completions.table.column_names:
        raise UserError(
            f"--task likelihood scores a completion after its prompt, and rows of {completions.path} have "
            "several turns (--turns_column), of which the last prompt alone is kept: generate from whole "
            "conversations with --messages_column, or take another task"
        )
    splits = completions.manifest is not None and completions.manifest.fingerprint.get("split_special_tokens")
    checkpoint = open_checkpoint("--model", config.model)
    rows = completions.rows(*IDENTITY_COLUMNS, "prompt", "completion_ids", "num_prompt_tokens")
    scored = [row["finish_reason"] != ERROR and len(row["completion_ids"]) > 0 for row in rows]
    if not any(scored):
        raise UserError(f"{completions.path} has no completion with any token")
    tokenizer = load_tokenizer(checkpoint)
    token_rows = [
        _token_row(tokenizer, row, checkpoint, splits=bool(splits))
        for row, is_scored in zip(rows, scored, strict=True)
        if is_scored
    ]
    model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32)
    model = model.to(local_device(config.device)).eval()
    found = iter(log_likelihoods(model, token_rows, config.max_num_batched_tokens))
    sums = [next(found) if is_scored else 0.0 for is_scored in scored]
    counts = [
        len(row["completion_ids"]) if is_scored else 0 for row, is_scored in zip(rows, scored, strict=True)
    ]
    groups = Groups.of([row["row_id"] for row in rows])
    return Scores(
        columns={
            **identity_columns(rows),
            "log_likelihood": [
                value if is_scored else None for value, is_scored in zip(sums, scored, strict=True)
            ],
            "num_tokens": counts,
        },
        metrics={"log_likelihood_per_token": Metric(groups.sums(sums), groups.sums(counts))},
        prompt_ids_P=groups.prompt_ids_P,
        facts={"model": config.model, "num_tokens": sum(counts)},
    )


def log_likelihoods(
    model: PreTrainedModel, rows: Sequence[TokenRow], max_num_batched_tokens: int
) -> list[float]:
    """The sum of the completion tokens' log-probabilities, for each row in order."""
    found = np.empty(len(rows))
    progress = tqdm(total=len(rows), unit=" rows", disable=None)
    with progress, torch.inference_mode():
        for members in _batches([len(row.token_ids) for row in rows], max_num_batched_tokens):
            found[members] = _pass(model, [rows[index] for index in members])
            progress.update(len(members))
    return list(found.tolist())


def _pass(model: PreTrainedModel, rows: Sequence[TokenRow]) -> np.ndarray:
    """Rows are padded at the end, which a causal model does not see."""
    length = max(len(row.token_ids) for row in rows)
    token_ids_RL = torch.zeros(len(rows), length, dtype=torch.int64)
    mask_RL = torch.zeros(len(rows), length, dtype=torch.int64)
    for index, row in enumerate(rows):
        token_ids_RL[index, : len(row.token_ids)] = torch.tensor(row.token_ids)
        mask_RL[index, : len(row.token_ids)] = 1
    device = model.device
    logits_RLV = model(
        input_ids=token_ids_RL.to(device), attention_mask=mask_RL.to(device), use_cache=False
    ).logits
    sums = []
    for index, row in enumerate(rows):
        end = len(row.token_ids)
        # The logits at a position are those of the next token.
        logits_NV = logits_RLV[index, row.start - 1 : end - 1].float()
        chosen_N = torch.tensor(row.token_ids[row.start :], device=device)
        log_probs_N = torch.log_softmax(logits_NV, dim=-1).gather(1, chosen_N[:, None])
        sums.append(float(log_probs_N.double().sum()))
    return np.array(sums)


def _batches(lengths: Sequence[int], max_num_batched_tokens: int) -> Iterator[list[int]]:
    """Indices of rows of similar lengths, for little padding; the longest first, so that a lack of memory
    shows at once."""
    members: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        longest = lengths[members[0]] if members else lengths[index]
        if members and longest * (len(members) + 1) > max_num_batched_tokens:
            yield members
            members = []
        members.append(index)
    if members:
        yield members


def _token_row(
    tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], checkpoint: Checkpoint, *, splits: bool
) -> TokenRow:
    """Text prompts were encoded with the tokenizer's special tokens, chats with those of their template."""
    for with_special in (True, False):
        prompt_ids: list[int] = tokenizer(row["prompt"], add_special_tokens=with_special)["input_ids"]
        if len(prompt_ids) == row["num_prompt_tokens"]:
            return TokenRow([*prompt_ids, *row["completion_ids"]], len(prompt_ids))
    raise UserError(
        f"--model {checkpoint.name}: its tokenizer gives {len(prompt_ids)} tokens for the prompt of row "
        f"{row['row_id']}, and the run had {row['num_prompt_tokens']}: "
        + (
            "a text does not tell which special tokens --split_special_tokens has split"
            if splits
            else "name the run's target, or a model with the same tokenizer"
        )
    )
