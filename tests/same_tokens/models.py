"""The models and prompts of all cases, made once, for both trees."""

from __future__ import annotations

from pathlib import Path

from tests.engine.eagle import eagle_model
from tests.job.copying import build_copying_pair
from tests.job.heads import write_heads
from tests.job.pair import NUM_VOCAB_TOKENS, build_pair, random_llama, save, train_tokenizer

# The layers of EAGLE's target whose states its draft reads are three.
NUM_EAGLE_LAYERS = 3
COPYING_DISTANCE = 200


def build_models(folder: Path) -> None:
    """``target``, ``draft``, ``prompts.arrow``, ``heads``, ``eagle_target``, ``eagle`` and ``copying``."""
    write_heads(build_pair(folder))
    target = random_llama(num_hidden_layers=NUM_EAGLE_LAYERS)
    save(folder / "eagle_target", target, train_tokenizer())
    eagle_model(target, range(0, NUM_VOCAB_TOKENS, 2)).save_pretrained(folder / "eagle")
    build_copying_pair(folder / "copying", distance=COPYING_DISTANCE, num_prompts=4)
