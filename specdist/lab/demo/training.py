"""Training from scratch in a limited time, the draft by distillation, and the agreement of the two.

Shape suffixes: B windows of one step, L tokens of a window, R rows, P prompt tokens, N new tokens,
V vocabulary.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

logger = logging.getLogger(__name__)

WINDOW_TOKENS = 256
WINDOWS_PER_STEP = 4
HELD_OUT_WINDOWS = 64
NUM_WARMUP_STEPS = 20
PROGRESS_EVERY_S = 10.0
EMBEDDING_STD = 0.5
# Of the agreement of the pair.
NUM_ROWS, NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = 32, 64, 64


@dataclass(frozen=True, kw_only=True)
class LearningRates:
    """Peak rates, larger for the embedding and the head, whose rows are each used rarely."""

    embedding: float
    head: float
    layers: float


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training. ``held_out_loss`` is in nats per token."""

    num_steps: int
    num_tokens: int
    wall_s: float
    held_out_loss: float


def initialize(model: LlamaForCausalLM, seed: int) -> None:
    """Start every layer as the identity and the head at zero, so that a few hundred steps go a long way.

    With the usual small embeddings, random layer outputs drown the token itself, and most of a one-minute
    training is spent on undoing that.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
            torch.nn.init.zeros_(weight)
        elif name.endswith("embed_tokens.weight"):
            torch.nn.init.normal_(weight, std=EMBEDDING_STD, generator=generator)
        elif weight.ndim == 2:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=generator)


def train(
    model: LlamaForCausalLM,
    training_ids: torch.Tensor,
    held_out_ids: torch.Tensor,
    *,
    rates: LearningRates,
    max_steps: int,
    max_seconds: float,
    seed: int,
    label: str,
    teacher: LlamaForCausalLM | None = None,
) -> TrainingResult:
    """Train with AdamW for ``max_steps``, or for ``max_seconds`` on a slow machine.

    The cosine schedule follows the limit that is nearer to its end, so training always ends at a low rate.

    With a ``teacher`` the loss is the Kullback-Leibler divergence to its distribution instead of the text's
    cross-entropy. ``training_ids`` and ``held_out_ids`` are flat streams of documents separated by EOS.
    """
    optimizer = torch.optim.AdamW(_parameter_groups(model, rates), betas=(0.9, 0.99), weight_decay=0.0)
    peak_rates = [group["lr"] for group in optimizer.param_groups]
    batches = _batches(training_ids, seed)
    start, next_report, num_steps, num_tokens = time.monotonic(), PROGRESS_EVERY_S, 0, 0
    model.train()
    while num_steps < max_steps and (elapsed := time.monotonic() - start) < max_seconds:
        scale = _schedule(max(num_steps / max_steps, elapsed / max_seconds), num_steps)
        for group, peak_rate in zip(optimizer.param_groups, peak_rates, strict=True):
            group["lr"] = peak_rate * scale
        ids_BL = next(batches)
        loss = _loss(model, ids_BL, teacher)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        num_steps += 1
        num_tokens += ids_BL.numel()
        if elapsed >= next_report:
            logger.info(f"{label}: {elapsed:.0f} s, step {num_steps}/{max_steps}, loss {loss.item():.3f}")
            next_report += PROGRESS_EVERY_S
    model.eval()
    wall_s = time.monotonic() - start
    return TrainingResult(num_steps, num_tokens, wall_s, held_out_loss(model, held_out_ids))


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, held_out_ids: torch.Tensor) -> float:
    """Mean cross-entropy over the first windows of ``held_out_ids``, in nats per token."""
    windows = _windows(held_out_ids, offset=0)[:HELD_OUT_WINDOWS]
    losses = [_loss(model, ids_BL, None).item() * len(ids_BL) for ids_BL in windows.split(WINDOWS_PER_STEP)]
    return sum(losses) / len(windows)


@torch.inference_mode()
def greedy_agreement(target: LlamaForCausalLM, draft: LlamaForCausalLM, held_out_ids: torch.Tensor) -> float:
    """Share of the target's greedy continuations on which the draft has the same likeliest next token.

    This is the rate at which a greedy run accepts draft tokens, position by position.
    """
    last_start = len(held_out_ids) - NUM_PROMPT_TOKENS
    starts = torch.linspace(0, last_start, NUM_ROWS).long()
    prompt_RP = torch.stack([held_out_ids[start : start + NUM_PROMPT_TOKENS] for start in starts])
    text_RL = target.generate(
        prompt_RP,
        attention_mask=torch.ones_like(prompt_RP),
        min_new_tokens=NUM_NEW_TOKENS,
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
    )
    draft_choice_RN = draft(text_RL).logits[:, NUM_PROMPT_TOKENS - 1 : -1].argmax(-1)
    return (draft_choice_RN == text_RL[:, NUM_PROMPT_TOKENS:]).float().mean().item()


def _loss(model: LlamaForCausalLM, ids_BL: torch.Tensor, teacher: LlamaForCausalLM | None) -> torch.Tensor:
    logits_BLV = model(ids_BL, use_cache=False).logits
    if teacher is None:
        return F.cross_entropy(logits_BLV[:, :-1].flatten(0, 1), ids_BL[:, 1:].flatten())
    with torch.no_grad():
        teacher_BLV = teacher(ids_BL, use_cache=False).logits.log_softmax(-1)
    return F.kl_div(
        logits_BLV.log_softmax(-1).flatten(0, 1),
        teacher_BLV.flatten(0, 1),
        log_target=True,
        reduction="batchmean",
    )


def _parameter_groups(model: LlamaForCausalLM, rates: LearningRates) -> list[dict]:
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    layers = [weight for weight in model.parameters() if weight is not embedding and weight is not head]
    return [
        {"params": [embedding], "lr": rates.embedding},
        {"params": [head], "lr": rates.head},
        {"params": layers, "lr": rates.layers},
    ]


def _schedule(progress: float, num_steps: int) -> float:
    """Linear warm-up over the first steps, cosine decay over all of the training down to 2 % of the peak."""
    warm_up = min(1.0, (num_steps + 1) / NUM_WARMUP_STEPS)
    return warm_up * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def _windows(ids: torch.Tensor, offset: int) -> torch.Tensor:
    num_windows = (len(ids) - offset) // WINDOW_TOKENS
    return ids[offset : offset + num_windows * WINDOW_TOKENS].view(num_windows, WINDOW_TOKENS)


def _batches(ids: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    """Endless windows in random order; every pass over the text cuts it at other places."""
    generator = np.random.default_rng(seed)
    while True:
        windows = _windows(ids, int(generator.integers(WINDOW_TOKENS)))
        order = torch.from_numpy(generator.permutation(len(windows)))
        yield from windows[order].split(WINDOWS_PER_STEP)
