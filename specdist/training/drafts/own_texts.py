"""Texts that the draft itself writes, for the target to judge: the on-policy data of DistillSpec (Zhou et al.
2023, arXiv:2310.08461) and GKD (Agarwal et al. 2023, arXiv:2306.13649).

The target's distribution after every token of a text takes one pass over it, whoever has written it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.training.drafts.data import IGNORED, padded

MOST_TOKENS = 256
# Greedy texts of a small model repeat themselves: it learns less from them.
LEAST_TEMPERATURE = 0.5


def with_own_texts(
    inputs: dict[str, Tensor],
    draft: PreTrainedModel,
    *,
    temperature: float,
    vocab_size: int,
    num_tokens: int,
    seeds: Sequence[int],
) -> dict[str, Tensor]:
    """A batch with what the draft writes after each prompt in it, up to the text's end or to a token that is
    not among the ``vocab_size`` ids of the target; the same for the same ``seeds``."""
    ids, labels = list(inputs["input_ids"]), list(inputs["labels"])
    rows = [row for row, labels_L in enumerate(labels) if int(labels_L[0]) != IGNORED]
    prompts = [labels[row][labels[row] != IGNORED] for row in rows]
    left_BL = padded(prompts, IGNORED, "left") if rows else inputs["input_ids"]
    longest = left_BL.shape[1]
    room = getattr(draft.config.get_text_config(), "max_position_embeddings", 2**31) - longest
    num_tokens = min(room, num_tokens, MOST_TOKENS)
    if not rows or num_tokens < 1:
        return inputs
    ends = draft.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    draft.eval()
    with torch.no_grad(), torch.random.fork_rng([left_BL.device] if left_BL.is_cuda else []):
        torch.manual_seed(int(np.random.default_rng(seeds).integers(2**31)))
        drawn_BN = draft.generate(
            left_BL.clamp_min(0),
            attention_mask=(left_BL != IGNORED).long(),
            max_new_tokens=num_tokens,
            pad_token_id=min(ends, default=0),
            do_sample=True,
            temperature=max(LEAST_TEMPERATURE, temperature),
            top_k=0,
            top_p=1.0,
        )[:, longest:]
    draft.train()
    is_end_BN = torch.isin(drawn_BN, torch.tensor(ends, dtype=torch.int64, device=drawn_BN.device)).long()
    is_over_BN = (is_end_BN.cumsum(1) - is_end_BN + (drawn_BN >= vocab_size).cumsum(1)) > 0
    for row, prompt, drawn_N, is_over_N in zip(rows, prompts, drawn_BN, is_over_BN, strict=True):
        ids[row] = labels[row] = torch.cat([prompt, drawn_N[~is_over_N]])
    return {"input_ids": padded(ids, 0), "labels": padded(labels, IGNORED)}
