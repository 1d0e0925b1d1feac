"""A small block drafter (DFlash) for a small target, trained on a CPU in minutes, in speculators' format.

``python -m tests.lab.block_drafter --target TARGET --texts TEXTS.arrow --output FOLDER --minutes 20``

Every step runs the target over the beginnings of some texts, puts blocks at random places of each, and lowers
the divergence of the draft's distributions from the target's; that of a block's first tokens counts most, as
none after a rejected one is used.

A texts, T tokens of each, K blocks of each, B tokens of a block, S numbers of the states, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdist.models.drafters.blocks.block import BlockDrafter
from specdist.models.drafters.blocks.block_config import published_config

logger = logging.getLogger(__name__)

NUM_TOKENS, NUM_TEXTS, NUM_BLOCKS = 160, 8, 20
# The weight of a token is e^(-depth / DECAY).
DECAY, LEARNING_RATE, WARM_UP = 4.0, 1e-3, 30


def speculators_config(target: PreTrainedModel, *, num_layers: int, block_size: int) -> dict[str, Any]:
    """A config.json; the states are those after the first, the middle and the next to last layers."""
    text = target.config
    num_target = text.num_hidden_layers
    layers = {name: getattr(text, name) for name in (
        "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
        "max_position_embeddings", "rope_parameters",
    )}  # fmt: skip
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": block_size - 1}],
            "verifier": {"architectures": text.architectures, "name_or_path": text.name_or_path},
        },
        "draft_vocab_size": text.vocab_size,
        "block_size": block_size,
        "mask_token_id": text.eos_token_id,
        "aux_hidden_state_layer_ids": [2, num_target // 2, num_target - 1],
        "transformer_layer_config": layers
        | {"model_type": "qwen3", "num_hidden_layers": num_layers, "intermediate_size": 2 * text.hidden_size},
    }


def batches(tokenizer: Any, path: Path, seed: int) -> Iterator[Tensor]:
    """Token ids [A, T] of the beginnings of texts, again and again."""
    texts = pa.ipc.open_file(path).read_all()["text"].to_pylist()
    order, begun = torch.Generator().manual_seed(seed), []
    while True:
        for index in torch.randperm(len(texts), generator=order).tolist():
            ids = tokenizer(texts[index], truncation=True, max_length=NUM_TOKENS)["input_ids"]
            if len(ids) == NUM_TOKENS:
                begun.append(ids)
            if len(begun) == NUM_TEXTS:
                yield torch.tensor(begun)
                begun = []


def block_states(drafter: BlockDrafter, token_ids: Tensor, states: Tensor, anchors_AK: Tensor) -> Tensor:
    """[A × K × B, E]: the output states of blocks at these places of the texts."""
    num_texts, num_tokens = token_ids.shape
    size = drafter.config.block_size
    positions = torch.arange(num_tokens).repeat(num_texts)
    contexts = list(drafter.contexts(states.flatten(0, 1), positions))
    ids = torch.full((*anchors_AK.shape, size), drafter.config.mask_token_id)
    ids[:, :, 0] = token_ids.gather(1, anchors_AK)
    places = anchors_AK[:, :, None] + torch.arange(size)
    owners = torch.arange(anchors_AK.shape[1]).repeat_interleave(size)
    sees_context = torch.arange(num_tokens) < anchors_AK.repeat_interleave(size, dim=1)[:, :, None]
    sees_own = (owners[:, None] == owners).expand(num_texts, -1, -1)
    seen = torch.cat([sees_context, sees_own], dim=2)[:, None]

    def attend(layer: int, queries: Tensor, *own: Tensor) -> Tensor:
        def by_text(heads: Tensor) -> Tensor:
            return heads.unflatten(0, (num_texts, -1)).transpose(1, 2)

        keys, values = (
            torch.cat([by_text(each), by_text(mine)], dim=2)
            for each, mine in zip(contexts[layer], own, strict=True)
        )
        found = F.scaled_dot_product_attention(
            by_text(queries), keys, values, attn_mask=seen, enable_gqa=True
        )
        return found.transpose(1, 2).flatten(0, 1)

    return drafter.block(ids.flatten(), places.flatten(), attend)


def loss_of(drafter: BlockDrafter, target: PreTrainedModel, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and by depth the common mass of both distributions [B - 1]."""
    layers, size = drafter.config.state_layers, drafter.config.block_size
    with torch.no_grad():
        found = target(token_ids, output_hidden_states=True)
    states = torch.cat([found.hidden_states[layer] for layer in layers], dim=-1)
    anchors = torch.rand(len(token_ids), NUM_TOKENS - size - 1).topk(NUM_BLOCKS).indices + 1
    hidden = block_states(drafter, token_ids, states, anchors).unflatten(0, (-1, size))[:, 1:]
    draft_logs = drafter.lm_head(hidden).log_softmax(dim=-1)
    places = (anchors[:, :, None] + torch.arange(size - 1)).flatten(1)
    logits = found.logits.gather(1, places[:, :, None].expand(-1, -1, found.logits.shape[-1]))
    wanted = logits.softmax(dim=-1).view_as(draft_logs)
    weights = torch.exp(-torch.arange(size - 1) / DECAY)
    losses = F.kl_div(draft_logs, wanted, reduction="none").sum(dim=-1).mean(dim=0)
    return (losses * weights).sum() / weights.sum(), torch.minimum(draft_logs.exp(), wanted).sum(-1).mean(0)


def train(
    target: PreTrainedModel, tokenizer: Any, options: argparse.Namespace, config: dict[str, Any]
) -> BlockDrafter:
    torch.manual_seed(options.seed)
    drafter = BlockDrafter(published_config(config))
    embedding = target.get_input_embeddings().weight
    drafter.embed_tokens.weight = torch.nn.Parameter(embedding.detach().clone(), requires_grad=False)
    drafter.lm_head.weight = torch.nn.Parameter(target.get_output_embeddings().weight.detach().clone())
    if options.begin is not None:
        drafter.load_state_dict(load_file(options.begin / "model.safetensors"), strict=False)
    trained = [weight for weight in drafter.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    begin, shares = time.monotonic(), torch.zeros(drafter.config.block_size - 1)
    for step, token_ids in enumerate(batches(tokenizer, options.texts, options.seed)):
        spent = (time.monotonic() - begin) / (60 * options.minutes)
        if spent >= 1:
            break
        rate = min(1.0, (step + 1) / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * spent))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * rate
        loss, common = loss_of(drafter, target, token_ids)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        shares = 0.9 * shares + 0.1 * common.detach()
        if step % 20 == 0:
            shown = " ".join(f"{share:.2f}" for share in shares / (1 - 0.9 ** (step + 1)))
            logger.info("step %d, %.0f%%: loss %.3f, common mass %s", step, 100 * spent, loss.item(), shown)
    return drafter.eval()


def save(drafter: BlockDrafter, config: dict[str, Any], folder: Path) -> None:
    """As speculators saves one that knows all ids."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in drafter.named_parameters()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    for name in ("target", "texts", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--begin", type=Path, help="the output of an earlier run, to train on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--block_size", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    target = (
        AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32).eval().requires_grad_(False)
    )
    config = speculators_config(target, num_layers=options.layers, block_size=options.block_size)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    save(train(target, tokenizer, options, config), config, options.output)


if __name__ == "__main__":
    main()
