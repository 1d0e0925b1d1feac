"""A tiny random target and draft with a tokenizer, and prompts for them, as files.

python -m tests.job.pair FOLDER
"""

from __future__ import annotations

import copy
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

EOS_TOKEN = "<|end|>"
NUM_VOCAB_TOKENS = 320
MAX_POSITIONS = 128
NUM_PROMPTS = 24
# Large enough that the draft errs, small enough that it is mostly right; a test holds the acceptance.
DRAFT_NOISE = 0.03
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TEXT = (
    "the quick brown fox jumps over a lazy dog while seven wizards brew strange potions and every sailor "
    "sings of rivers that never reach any sea but turn back to the mountains in winter"
)


@dataclass(frozen=True)
class Pair:
    """Folders of the models, and the file of prompts with its columns ``prompt`` and ``reference``."""

    folder: Path
    target: Path
    draft: Path
    prompts: Path

    def job(self, **options: Any) -> dict[str, Any]:
        """Options of a job on the CPU over these prompts."""
        files = {"prompts": self.prompts, "target": self.target, "draft": self.draft}
        return {**files, "device": "cpu", **options}


def build_pair(folder: Path) -> Pair:
    """The same files every time."""
    tokenizer = train_tokenizer()
    target = random_llama()
    save(folder / "target", target, tokenizer, max_shard_size="200KB")
    save(folder / "draft", noisy_copy(target, DRAFT_NOISE), tokenizer)
    prompts = folder / "prompts.arrow"
    texts = some_texts(NUM_PROMPTS)
    write_arrow(prompts, {"prompt": texts, "reference": [f"reference {row}" for row in range(len(texts))]})
    return Pair(folder, folder / "target", folder / "draft", prompts)


def train_tokenizer(extra_text: str = "") -> PreTrainedTokenizerFast:
    """Byte-level BPE with an end token; other text gives other tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_VOCAB_TOKENS,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT, extra_text], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS_TOKEN, pad_token=EOS_TOKEN, chat_template=CHAT_TEMPLATE
    )


def random_llama(*, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A target with four heads over two key/value heads."""
    settings: dict[str, Any] = {
        "vocab_size": NUM_VOCAB_TOKENS,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
        # Wide weights: greedy output that depends on the whole context, and is not one token over and over.
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).float().eval()


@torch.no_grad()
def noisy_copy(model: PreTrainedModel, noise: float, *, seed: int = 1) -> PreTrainedModel:
    """A model that mostly agrees: its weights with ``noise`` of their own spread added."""
    generator = torch.Generator().manual_seed(seed)
    noisy = copy.deepcopy(model)
    for parameter in noisy.parameters():
        spread = parameter.std() if parameter.dim() > 1 else 0.0
        parameter += noise * spread * torch.randn(parameter.shape, generator=generator)
    return noisy


def windowed_target(folder: Path) -> Path:
    """A model whose layers see the last 8 tokens, fewer than its prompts have, of the longest 512."""
    config = MistralConfig(**random_llama().config.to_dict() | {"sliding_window": 8})
    config.max_position_embeddings = 512
    torch.manual_seed(0)
    return save(folder, MistralForCausalLM(config).float().eval(), train_tokenizer())


def save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    tokenizer.save_pretrained(folder)
    return folder


def some_texts(num: int, *, seed: int = 0) -> list[str]:
    """Prompts of different lengths; the same seed gives the same."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(TEXT.split(), k=rng.randrange(2, 9))) for _ in range(num)]


def write_arrow(path: Path, columns: dict[str, Any]) -> Path:
    """An Arrow IPC file of these columns, lists or arrays."""
    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return path


if __name__ == "__main__":
    build_pair(Path(sys.argv[1]))
