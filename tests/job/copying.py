"""A pair whose every token is known beforehand: each repeats the token that stands a fixed distance back.

    python -m tests.job.copying FOLDER --distance 5000 --num_prompts 16

writes ``target``, ``draft``, ``prompts.arrow`` and, laid out as a run, ``known``: the right completions.

One layer, built by hand. All keys are the same vector and so are all queries, so that the rotary embedding
alone decides where attention looks: at the one distance where all its frequencies agree, by a margin that
rounding cannot reach. Rotary frequencies that are a little wrong look elsewhere. The draft is the same model,
except that it confuses some tokens.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tests.job.pair import NUM_VOCAB_TOKENS, TEXT, save, train_tokenizer, write_arrow

DISTANCE = 1200
HEAD_WIDTH, NUM_HEADS = 64, 6
# With this base, frequencies rounded to bfloat16 agree best one token too near.
ROPE_THETA = 200.0
# Of a score before softmax, for each frequency: neighbouring positions are 1.7 apart.
SHARPNESS = 60.0
# At this distance; at others in proportion.
NUM_PROMPT_WORDS = (620, 680)
NUM_POSITIONS = 2048


@torch.no_grad()
def copying_llama(num_swapped: int = 0, distance: int = DISTANCE) -> PreTrainedModel:
    """A float32 model; its errors are ``num_swapped`` pairs of tokens that it confuses."""
    width = 2 * NUM_VOCAB_TOKENS + 20
    constant = 2 * NUM_VOCAB_TOKENS  # a dimension in which all tokens are alike
    config = LlamaConfig(
        vocab_size=NUM_VOCAB_TOKENS,
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        head_dim=HEAD_WIDTH,
        max_position_embeddings=NUM_POSITIONS * distance // DISTANCE,
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
    normed = math.sqrt(width / 2)  # what the norm makes of each of an embedding's two ones
    attention = model.model.layers[0].self_attn
    # Every head copies a part of the vocabulary; all look at the same position.
    attention.v_proj.weight[ids, ids] = 1 / normed
    attention.o_proj.weight[NUM_VOCAB_TOKENS + ids, ids] = 1
    half = HEAD_WIDTH // 2
    strength = math.sqrt(SHARPNESS * math.sqrt(HEAD_WIDTH) / normed**2)
    turns = distance * model.model.rotary_emb.inv_freq
    for head in range(NUM_HEADS):
        first = head * HEAD_WIDTH
        attention.k_proj.weight[first : first + half, constant] = strength
        # Turned back by the distance: a query that far after a key is aligned with it.
        attention.q_proj.weight[first : first + half, constant] = strength * turns.cos()
        attention.q_proj.weight[first + half : first + HEAD_WIDTH, constant] = -strength * turns.sin()
    read = ids.clone()
    for number in range(num_swapped):
        pair = torch.tensor([20 + 8 * number, 24 + 8 * number])
        read[pair] = read[pair.flip(0)]
    model.lm_head.weight[ids, NUM_VOCAB_TOKENS + read] = 1
    return model


def build_copying_pair(
    folder: Path, num_prompts: int = 3, distance: int = DISTANCE
) -> tuple[Path, Path, Path]:
    """Folders of target and draft in bfloat16, which holds all their numbers closely enough, and prompts."""
    tokenizer = train_tokenizer()
    target = save(folder / "target", copying_llama(distance=distance).bfloat16(), tokenizer)
    draft = save(folder / "draft", copying_llama(num_swapped=20, distance=distance).bfloat16(), tokenizer)
    words, rng = TEXT.split(), random.Random(0)
    fewest, most = (number * distance // DISTANCE for number in NUM_PROMPT_WORDS)
    texts = [" ".join(rng.choices(words, k=rng.randrange(fewest, most))) for _ in range(num_prompts)]
    return target, draft, write_arrow(folder / "prompts.arrow", {"prompt": texts})


def known_completions(target: Path, texts: list[str], num_tokens: int, distance: int) -> list[list[int]]:
    """After each prompt: what stands ``distance`` tokens before its last token, and what follows there."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    assert all(len(prompt) >= 1.25 * distance for prompt in prompts)
    firsts = [len(prompt) - 1 - distance for prompt in prompts]
    return [prompt[first : first + num_tokens] for prompt, first in zip(prompts, firsts, strict=True)]


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.job.copying", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--distance", type=int, default=DISTANCE)
    parser.add_argument("--num_prompts", type=int, default=3)
    parser.add_argument("--num_tokens", type=int, default=32, help="of a completion")
    options = parser.parse_args()
    target, _, prompts = build_copying_pair(options.folder, options.num_prompts, options.distance)
    texts = pa.ipc.open_file(str(prompts)).read_all()["prompt"].to_pylist()
    known = known_completions(target, texts, options.num_tokens, options.distance)
    shards = options.folder / "known" / "shards"
    shards.mkdir(parents=True, exist_ok=True)
    write_arrow(shards / "shard-00000.arrow", {"completion_ids": known})
    return 0


if __name__ == "__main__":
    sys.exit(main())
