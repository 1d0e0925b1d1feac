"""A pair whose every token is known beforehand: it repeats what stands ``DISTANCE`` tokens back.

One layer, built by hand. All keys are one vector and all queries another, so that the rotary embedding alone
decides where attention looks: at one distance, where all its frequencies agree, by a margin that no rounding
reaches. Rotary frequencies that are a little wrong look elsewhere. The draft is the same model, but for some
tokens that it takes for others.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.job.pair import NUM_VOCAB_TOKENS, TEXT, save, train_tokenizer, write_arrow

DISTANCE = 1200
HEAD_WIDTH, NUM_HEADS = 64, 6
# With it the frequencies in bfloat16 agree best one token too near.
ROPE_THETA = 200.0
# Of a score, before softmax, for each frequency: neighbours are 1.7 of it apart.
SHARPNESS = 60.0
NUM_PROMPT_WORDS = (620, 680)


@torch.no_grad()
def copying_llama(num_swapped: int = 0) -> PreTrainedModel:
    """``num_swapped`` pairs of tokens that are taken for each other: its errors."""
    width = 2 * NUM_VOCAB_TOKENS + 20
    constant = 2 * NUM_VOCAB_TOKENS  # a number that all tokens have alike
    config = LlamaConfig(
        vocab_size=NUM_VOCAB_TOKENS,
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        head_dim=HEAD_WIDTH,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rms_norm_eps=1e-9,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).float().eval()
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            parameter.zero_()
    ids = torch.arange(NUM_VOCAB_TOKENS)
    model.model.embed_tokens.weight[ids, ids] = 1
    model.model.embed_tokens.weight[:, constant] = 1
    normed = math.sqrt(width / 2)  # of both ones, once they are normed
    attention = model.model.layers[0].self_attn
    # Every head has a part of the vocabulary; all look at the same place.
    attention.v_proj.weight[ids, ids] = 1 / normed
    attention.o_proj.weight[NUM_VOCAB_TOKENS + ids, ids] = 1
    half = HEAD_WIDTH // 2
    strength = math.sqrt(SHARPNESS * math.sqrt(HEAD_WIDTH) / normed**2)
    turns = DISTANCE * model.model.rotary_emb.inv_freq
    for head in range(NUM_HEADS):
        first = head * HEAD_WIDTH
        attention.k_proj.weight[first : first + half, constant] = strength
        # Turned back by the distance; a query at the same place plus the distance is in line with the key.
        attention.q_proj.weight[first : first + half, constant] = strength * turns.cos()
        attention.q_proj.weight[first + half : first + HEAD_WIDTH, constant] = -strength * turns.sin()
    read = ids.clone()
    for number in range(num_swapped):
        pair = torch.tensor([20 + 8 * number, 24 + 8 * number])
        read[pair] = read[pair.flip(0)]
    model.lm_head.weight[ids, NUM_VOCAB_TOKENS + read] = 1
    return model


def build_copying_pair(folder: Path, num_prompts: int = 3) -> tuple[Path, Path, Path]:
    """Folders of target and draft in bfloat16, which holds all their numbers closely enough, and prompts."""
    tokenizer = train_tokenizer()
    target = save(folder / "target", copying_llama().bfloat16(), tokenizer)
    draft = save(folder / "draft", copying_llama(num_swapped=20).bfloat16(), tokenizer)
    words, rng = TEXT.split(), random.Random(0)
    texts = [" ".join(rng.choices(words, k=rng.randrange(*NUM_PROMPT_WORDS))) for _ in range(num_prompts)]
    return target, draft, write_arrow(folder / "prompts.arrow", {"prompt": texts})
