"""Small drafters of a small target's states (DFlash, MTP, EAGLE-3), trained on a CPU core in minutes.

``python -m tests.lab.train_drafter --kind dflash --target TARGET --texts TEXTS.arrow --output FOLDER``

Every step runs the target over some texts, drafts at random places of each, and lowers the divergence of the
drafts' distributions from the target's; that of the first tokens counts most, as none after a rejected one is
used. Half of the texts are the target's own greedy continuations of beginnings (``prompt_chars``) of the others.

A texts, T tokens of each, N places of each, D tokens drafted there.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.lab.drafter_kinds import KINDS, Kind

logger = logging.getLogger(__name__)

MAX_TOKENS, TOKENS_PER_STEP, TOKENS_PER_ANCHOR = 256, 1024, 5
# The weight of a token is e^(-depth / DECAY).
DECAY, LEARNING_RATE, WARM_UP = 4.0, 4e-3, 50
NUM_NEW, NUM_TOGETHER = 96, 96


class Text(NamedTuple):
    num_prompt: int
    token_ids: list[int]


def written_texts(tokenizer: Any, path: Path, generator: random.Random) -> list[Text]:
    rows = pa.ipc.open_file(path).read_all().select(["text", "prompt_chars"]).to_pylist()
    generator.shuffle(rows)
    return [
        Text(
            len(tokenizer(row["text"][: row["prompt_chars"]])["input_ids"]),
            tokenizer(row["text"])["input_ids"][:MAX_TOKENS],
        )
        for row in rows
    ]


def own_texts(target: PreTrainedModel, texts: list[Text], minutes: float) -> list[Text]:
    """Greedy continuations of texts' beginnings, until the time is over; together those of one length."""
    end, eos, found = time.monotonic() + 60 * minutes, target.config.eos_token_id, []
    by_length: dict[int, list[list[int]]] = defaultdict(list)
    for text in texts:
        prompts = by_length[text.num_prompt]
        prompts.append(text.token_ids[: text.num_prompt])
        if time.monotonic() > end:
            break
        if len(prompts) == NUM_TOGETHER:
            asked = torch.tensor(prompts)
            prompts.clear()
            continued = target.generate(
                asked, attention_mask=torch.ones_like(asked), do_sample=False, max_new_tokens=NUM_NEW
            )
            for token_ids in continued.tolist():
                if eos in token_ids[text.num_prompt :]:
                    token_ids = token_ids[: token_ids.index(eos, text.num_prompt) + 1]
                found.append(Text(text.num_prompt, token_ids))
    return found


def batches(texts: list[Text], generator: random.Random) -> Iterator[list[Text]]:
    """Again and again, in random order, texts of similar length together."""
    while True:
        generator.shuffle(texts)
        for first in range(0, len(texts), 512):
            part = sorted(texts[first : first + 512], key=lambda text: len(text.token_ids))
            together, found = [], []
            for text in part:
                if (len(together) + 1) * len(text.token_ids) > TOKENS_PER_STEP:
                    found.append(together)
                    together = []
                together.append(text)
            generator.shuffle(found)
            yield from found


class Judged(NamedTuple):
    """Of drafted tokens: the loss; by depth [D] the mass that both distributions share, and how often all
    tokens so far are the target's likeliest."""

    loss: Tensor
    common: Tensor
    accepted: Tensor


# Steps from one judgement of what is accepted to the next.
EVERY = 10


def judge(kind: Kind, texts: list[Text], *, only_loss: bool = False) -> Judged:
    """Of drafts at random places of texts, after their prompts."""
    depth, lengths = kind.num_drafted, torch.tensor([len(text.token_ids) for text in texts])
    num_tokens = int(lengths.max())
    token_ids = torch.zeros(len(texts), num_tokens, dtype=torch.int64)
    for row, text in zip(token_ids, texts, strict=True):
        row[: len(text.token_ids)] = torch.tensor(text.token_ids)
    first = torch.tensor([max(text.num_prompt - 1, 1) for text in texts])
    places = torch.arange(num_tokens)
    is_free = (places >= first[:, None]) & (places < lengths[:, None] - 1)
    drawn = torch.where(is_free, torch.rand(is_free.shape), -1.0).topk(num_tokens // TOKENS_PER_ANCHOR)
    anchors = drawn.indices.clamp(min=1)
    judged = anchors[:, :, None] + torch.arange(depth)
    weights = ((drawn.values >= 0)[:, :, None] & (judged < lengths[:, None, None] - 1)).float()
    judged = judged.clamp(max=num_tokens - 1)
    with torch.no_grad():
        read = kind.target.model(token_ids, output_hidden_states=True, use_cache=False)
        layers = kind.state_layers
        states = read.last_hidden_state
        index = judged.flatten(1)[:, :, None].expand(-1, -1, states.shape[-1])
        wanted = kind.target.lm_head(states.gather(1, index)).float().softmax(dim=-1).flatten(0, 1)
        if layers is not None:
            states = torch.cat([read.hidden_states[layer] for layer in layers], dim=-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = kind.model.get_output_embeddings()(kind.hidden(token_ids, states, anchors)).flatten(0, 2).float()
    losses = F.cross_entropy(logits, wanted, reduction="none").view_as(weights)
    scale = torch.exp(-torch.arange(depth) / DECAY)
    loss = (losses * weights * scale).sum() / (weights * scale).sum().clamp(min=1)
    if only_loss:
        return Judged(loss, weights, weights)
    with torch.no_grad():
        counts = weights.sum(dim=(0, 1)).clamp(min=1)
        common = torch.minimum(logits.softmax(dim=-1), wanted).sum(dim=-1).view_as(weights)
        is_right = (logits.argmax(dim=-1) == wanted.argmax(dim=-1)).view_as(weights).cumprod(dim=-1)
        return Judged(
            loss, (common * weights).sum(dim=(0, 1)) / counts, (is_right * weights).sum(dim=(0, 1)) / counts
        )


class Training:
    """Matrices by Muon, all other weights by AdamW, with a rate that ends at zero."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.weights = [weight for weight in kind.model.parameters() if weight.requires_grad]
        matrices, others = ([w for w in self.weights if (w.dim() == 2) == is_matrix] for is_matrix in (True, False))
        self.optimizers = [
            torch.optim.Muon(matrices, lr=0.0, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0),
        ]

    def step(self, texts: list[Text], rate: float, *, only_loss: bool = False) -> Judged:
        judged = judge(self.kind, texts, only_loss=only_loss)
        judged.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        return judged


def train(kind: Kind, sources: list[list[Text]], options: argparse.Namespace) -> None:
    """In turn a batch of every source; the folder's files are renewed as it goes on."""
    training, generator = Training(kind), random.Random(options.seed)
    drawn = [batches(texts, generator) for texts in sources]
    begin, saved, means = time.monotonic(), 0, torch.zeros(len(sources), 2, kind.num_drafted)
    step = 0
    while (spent := (time.monotonic() - begin) / (60 * options.minutes)) < 1:
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * spent))
        which = step % len(sources)
        is_shown = step % EVERY < len(sources)
        judged = training.step(next(drawn[which]), rate, only_loss=not is_shown)
        if is_shown:
            means[which] += 0.2 * (torch.stack(judged[1:]) - means[which])
        step += 1
        if step % 100 == 0:
            for source, (common, accepted) in enumerate(means / (1 - 0.8 ** (step / EVERY))):
                logger.info(
                    "step %d, %.0f%%, texts %d: %.2f tokens a pass; common %s; accepted %s", step, 100 * spent,
                    source, 1 + accepted.sum(), shown(common), shown(accepted),
                )  # fmt: skip
        if spent > (saved + 1) / 6:
            kind.save(options.output)
            saved += 1
    kind.save(options.output)


def shown(shares: Tensor) -> str:
    return " ".join(f"{share:.3f}" for share in shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--kind", choices=KINDS, required=True)
    for name in ("target", "texts", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--own_minutes", type=float, default=4, help="for the target's own texts, before")
    parser.add_argument("--draft_tokens", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.bfloat16)
    target.eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    written = written_texts(tokenizer, options.texts, random.Random(options.seed))
    own = own_texts(target, written, options.own_minutes)
    logger.info("%d texts, and %d of the target's own", len(written), len(own))
    train(KINDS[options.kind](target, options.draft_tokens), [own, written], options)


if __name__ == "__main__":
    main()
