"""Texts that the draft itself writes, for the target to judge: the on-policy data of DistillSpec (Zhou et al.
2023, arXiv:2310.08461) and GKD (Agarwal et al. 2023, arXiv:2306.13649).

The target's distribution after every token of a text takes one pass over it, whoever has written it; to
write it would take the target a pass per token. So few completions of the target are needed, and yet as many
different texts as there are prompts. They are written anew as the training goes on, by the draft as it has
become: what is judged then is what it would draft now.

B prompts of a pass, L tokens of the longest, N tokens of one text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from specdist.job.ranks.topology import Topology, gathered
from specdist.training.drafts.data import Example

# Of --tokens_per_pass: writing keeps no activations, only keys, values and the logits of one place.
PASSES_AT_A_TIME = 4


@dataclass(frozen=True, kw_only=True)
class Writer:
    """The draft in training.

    Attributes:
        vocab_size: ids that the target knows, too; a text ends before any other.
        num_tokens: most tokens of a text after its prompt.
        temperature: of its draws; 0 = the likeliest tokens.
        tokens_per_pass: most tokens of a pass in training; a rank writes a few times as many at a time.
    """

    model: PreTrainedModel
    vocab_size: int
    num_tokens: int
    temperature: float
    seed: int
    tokens_per_pass: int
    topology: Topology


def with_own_texts(writer: Writer, prompts: Sequence[Example], step: int) -> list[Example]:
    """The prompts, each continued by the draft as it is at this step of the training. All ranks share the
    work and get the same; the same weights at the same step write the same texts."""
    texts = _written(writer, [example.token_ids for example in prompts], step)
    return [
        dataclasses.replace(
            example, completion_ids=np.concatenate([example.completion_ids, np.array(text, np.int32)])
        )
        for example, text in zip(prompts, texts, strict=True)
    ]


def _written(writer: Writer, prompts: Sequence[np.ndarray], step: int) -> list[list[int]]:
    """Prompts of like length are continued together, and such batches are dealt to the ranks."""
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    own: dict[int, list[int]] = {}
    number, topology = 0, writer.topology
    was_training = writer.model.training
    writer.model.eval()
    while order:
        longest = len(prompts[order[0]]) + writer.num_tokens
        size = max(1, PASSES_AT_A_TIME * writer.tokens_per_pass // longest)
        chosen, order = order[:size], order[size:]
        if number % topology.world_size == topology.rank:
            texts = _continued(writer, [prompts[index] for index in chosen], [writer.seed, step, number])
            own |= dict(zip(chosen, texts, strict=True))
        number += 1
    writer.model.train(was_training)
    together: dict[int, list[int]] = {}
    for part in gathered(topology, own):
        together |= part
    return [together[index] for index in range(len(prompts))]


@torch.no_grad()
def _continued(writer: Writer, prompts: Sequence[np.ndarray], seeds: Sequence[int]) -> list[list[int]]:
    """Draws that depend on these seeds alone."""
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
    drawing: dict[str, Any] = {"do_sample": False}
    if writer.temperature:
        drawing = {"do_sample": True, "temperature": writer.temperature, "top_k": 0, "top_p": 1.0}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(np.random.default_rng(seeds).integers(2**31)))
        drawn_BL = model.generate(
            torch.from_numpy(ids_BL).to(device),
            attention_mask=torch.from_numpy(is_token_BL).to(device),
            max_new_tokens=min(writer.num_tokens, room),
            pad_token_id=min(end_ids, default=0),
            **drawing,
        )
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
