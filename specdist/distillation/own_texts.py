"""Texts that the draft itself writes, for the target to judge: the on-policy data of DistillSpec (Zhou et al.
2023, arXiv:2310.08461) and GKD (Agarwal et al. 2023, arXiv:2306.13649).

The target's distribution after every token of a text takes one pass over it, whoever has written it; to
write it would take the target a pass per token. So few completions of the target are needed, and yet as many
different texts as there are prompts.

B prompts of a pass, L tokens of the longest, N tokens of one text.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from specdist.data.files import write_atomically
from specdist.distillation.data import Example
from specdist.job.topology import Topology, broadcast_from_rank0, gathered

TEXTS_NAME = "own_texts.json"
# Of the draft's draws at least: greedy texts of a small model repeat themselves.
LEAST_TEMPERATURE = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Writer:
    """The draft as it was before the training.

    Attributes:
        vocab_size: ids that the target knows, too; a text ends before any other.
        num_tokens: most tokens of a text after its prompt.
        tokens_per_pass: most tokens of prompts and texts that a rank writes at a time.
        fingerprint: of the draft's files.
    """

    model: PreTrainedModel
    vocab_size: int
    num_tokens: int
    temperature: float
    seed: int
    tokens_per_pass: int
    fingerprint: str
    topology: Topology


def with_own_texts(writer: Writer, prompts: Sequence[Example], folder: Path) -> list[Example]:
    """The prompts, each continued by the draft. All ranks share the work and get the same.

    They are kept in ``folder`` until the training has ended: one that goes on must have the same texts.
    """
    path = folder / TEXTS_NAME
    key = _key(writer, prompts)
    kept = json.loads(path.read_bytes()) if writer.topology.is_rank0 and path.is_file() else {}
    texts = broadcast_from_rank0(writer.topology, kept["texts"] if kept.get("key") == key else None)
    if texts is None:
        texts = _written(writer, [example.token_ids for example in prompts])
        if writer.topology.is_rank0:
            document = json.dumps({"key": key, "texts": texts}).encode()
            write_atomically(path, lambda file: file.write(document))
    return [
        dataclasses.replace(
            example, completion_ids=np.concatenate([example.completion_ids, np.array(text, np.int32)])
        )
        for example, text in zip(prompts, texts, strict=True)
    ]


def _key(writer: Writer, prompts: Sequence[Example]) -> str:
    values = [writer.num_tokens, writer.temperature, writer.seed, writer.tokens_per_pass, writer.fingerprint]
    found = hashlib.sha256(json.dumps(values).encode())
    for example in prompts:
        found.update(f"{len(example.token_ids)} ".encode() + example.token_ids.tobytes())
    return found.hexdigest()


def _written(writer: Writer, prompts: Sequence[np.ndarray]) -> list[list[int]]:
    """Prompts of like length are continued together, and such batches are dealt to the ranks."""
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    own: dict[int, list[int]] = {}
    number, topology = 0, writer.topology
    was_training = writer.model.training
    writer.model.eval()
    while order:
        size = max(1, writer.tokens_per_pass // (len(prompts[order[0]]) + writer.num_tokens))
        chosen, order = order[:size], order[size:]
        if number % topology.world_size == topology.rank:
            texts = _continued(writer, [prompts[index] for index in chosen], number)
            own |= dict(zip(chosen, texts, strict=True))
        number += 1
    writer.model.train(was_training)
    together: dict[int, list[int]] = {}
    for part in gathered(topology, own):
        together |= part
    return [together[index] for index in range(len(prompts))]


@torch.no_grad()
def _continued(writer: Writer, prompts: Sequence[np.ndarray], number: int) -> list[list[int]]:
    """Draws that depend on the seed and the number of the batch alone."""
    model, device = writer.model, writer.model.device
    longest = max(len(ids) for ids in prompts)
    room = int(getattr(model.config.get_text_config(), "max_position_embeddings", 2**31)) - longest
    if room < 1:
        return [[] for _ in prompts]
    ids_BL = np.zeros((len(prompts), longest), np.int64)
    is_token_BL = np.zeros((len(prompts), longest), np.int64)
    for row, ids in enumerate(prompts):
        ids_BL[row, longest - len(ids) :], is_token_BL[row, longest - len(ids) :] = ids, 1
    ends = model.generation_config.eos_token_id
    end_ids = set(ends) if isinstance(ends, list) else {ends} - {None}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(np.random.default_rng([writer.seed, number]).integers(2**31)))
        drawn_BL = model.generate(
            torch.from_numpy(ids_BL).to(device),
            attention_mask=torch.from_numpy(is_token_BL).to(device),
            max_new_tokens=min(writer.num_tokens, room),
            do_sample=True, temperature=writer.temperature, top_k=0, top_p=1.0,
            pad_token_id=min(end_ids, default=0),
        )  # fmt: skip
    return [_text(ids, end_ids, writer.vocab_size) for ids in drawn_BL[:, longest:].tolist()]


def _text(ids: Sequence[int], end_ids: set[int], vocab_size: int) -> list[int]:
    """Up to its end, with it."""
    text: list[int] = []
    for token_id in ids:
        if token_id >= vocab_size:
            break
        text.append(token_id)
        if token_id in end_ids:
            break
    return text
