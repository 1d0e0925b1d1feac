"""Small drafters of a small target's states (DFlash, MTP, EAGLE-3), trained on a CPU core in minutes.

``python -m tests.lab.train_drafter --kind dflash --target TARGET --texts TEXTS.arrow --output FOLDER``

Every step runs the target over some texts, drafts at random places of each, and lowers the divergence of the
drafts' distributions from the target's; that of the first tokens counts most, as none after a rejected one is
used. Several files take turns: texts, and what the target itself says (``jobs/generate.py --temperature 0``).

A texts, T tokens of each, N places of each, D tokens drafted there.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.lab.drafter_kinds import KINDS, Kind

logger = logging.getLogger(__name__)

MAX_TOKENS, TOKENS_PER_STEP, TOKENS_PER_PLACE = 256, 1024, 5
NUM_SORTED = 512
# The weight of a token is e^(-depth / DECAY).
DECAY, LEARNING_RATE, WARM_UP = 4.0, 4e-3, 50
SHOWN_EVERY = 100


class Text(NamedTuple):
    """Drafts are of the tokens after a prompt."""

    num_prompt: int
    token_ids: list[int]


def texts_of(tokenizer: Any, path: Path) -> list[Text]:
    """Of a file with columns ``text`` and ``prompt_chars``, or of a shard that ``jobs/generate.py`` wrote."""
    rows = pa.ipc.open_file(path).read_all().to_pylist()
    pairs = [
        (row["prompt"], row["prompt"] + (row["completion"] or ""))
        if "completion" in row
        else (row["text"][: row["prompt_chars"]], row["text"])
        for row in rows
    ]
    prompts, texts = (tokenizer(list(each))["input_ids"] for each in zip(*pairs, strict=True))
    return [Text(len(prompt), ids[:MAX_TOKENS]) for prompt, ids in zip(prompts, texts, strict=True)]


def batches(texts: list[Text], generator: random.Random) -> Iterator[list[Text]]:
    """Again and again in random order, texts of similar length together."""
    while True:
        generator.shuffle(texts)
        for first in range(0, len(texts), NUM_SORTED):
            found: list[list[Text]] = [[]]
            for text in sorted(texts[first : first + NUM_SORTED], key=lambda text: len(text.token_ids)):
                if (len(found[-1]) + 1) * len(text.token_ids) > TOKENS_PER_STEP:
                    found.append([])
                found[-1].append(text)
            generator.shuffle(found)
            yield from found


def loss_of(kind: Kind, texts: list[Text]) -> Tensor:
    """Of drafts at random places of texts, after their prompts."""
    lengths, depths = torch.tensor([len(text.token_ids) for text in texts]), torch.arange(kind.num_drafted)
    num_tokens = int(lengths.max())
    padded = [text.token_ids + [0] * (num_tokens - len(text.token_ids)) for text in texts]
    token_ids, places = torch.tensor(padded), torch.arange(num_tokens)
    first = torch.tensor([max(text.num_prompt - 1, 1) for text in texts])
    is_free = (places >= first[:, None]) & (places < lengths[:, None] - 1)
    drawn = torch.where(is_free, torch.rand(is_free.shape), -1.0).topk(max(num_tokens // TOKENS_PER_PLACE, 1))
    anchors = drawn.indices.clamp(min=1)
    judged = anchors[:, :, None] + depths
    weights = ((drawn.values >= 0)[:, :, None] & (judged < lengths[:, None, None] - 1)).float()
    with torch.no_grad():
        read = kind.target.model(token_ids, output_hidden_states=True, use_cache=False)
        states = read.last_hidden_state
        index = judged.clamp(max=num_tokens - 1).flatten(1)[:, :, None].expand(-1, -1, states.shape[-1])
        wanted = kind.target.lm_head(states.gather(1, index)).float().softmax(dim=-1).flatten(0, 1)
        if kind.state_layers is not None:
            states = torch.cat([read.hidden_states[layer] for layer in kind.state_layers], dim=-1)
    with torch.autocast("cpu", torch.bfloat16, enabled=states.dtype == torch.bfloat16):
        logits = kind.model.get_output_embeddings()(kind.hidden(token_ids, states, anchors)).float()
    losses = F.cross_entropy(logits.flatten(0, 2), wanted, reduction="none").view_as(weights)
    weights = weights * torch.exp(-depths / DECAY)
    return (losses * weights).sum() / weights.sum().clamp(min=1)


def train(kind: Kind, sources: list[list[Text]], num_steps: int, seed: int = 0) -> None:
    """Batches of the sources in turn. Matrices learn by Muon, all other weights by AdamW."""
    generator, weights = random.Random(seed), [each for each in kind.model.parameters() if each.requires_grad]
    drawn = itertools.cycle([batches(texts, generator) for texts in sources])
    optimizers = [
        torch.optim.Muon(
            [each for each in weights if each.dim() == 2], weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW([each for each in weights if each.dim() != 2], betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for step in range(num_steps):
        loss = loss_of(kind, next(next(drawn)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for optimizer in optimizers:
            decay = 0.5 + 0.5 * math.cos(math.pi * step / num_steps)
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP) * decay
            optimizer.step()
            optimizer.zero_grad()
        if step % SHOWN_EVERY == 0:
            logger.info("step %d: %.3f", step, loss.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--kind", choices=KINDS, required=True)
    for name in ("target", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--draft_tokens", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # Also for the products of matrices, which a CPU may compute faster.
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.bfloat16)
    target.eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    sources = [texts_of(tokenizer, path) for path in options.texts]
    kind = KINDS[options.kind](target, options.draft_tokens)
    train(kind, sources, options.steps, options.seed)
    kind.save(options.output)


if __name__ == "__main__":
    main()
