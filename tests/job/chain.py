"""A pair of models that count, so that the tokens of a run are known in advance.

Both see the last token alone. The target says that token t is followed by t + 1. The draft says so too, but
after every sixth token it leaves one out. Every choice is by a wide margin, so that rounding decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from specdist.cli import generate as main
from specdist.job.replica import replica
from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.heads.drafts import identify_draft
from specdist.models.heads.head import save_weights
from specdist.models.heads.info import HeadInfo
from specdist.policies.costs import CostModel, Curve
from tests.engine.heads import random_head
from tests.job.pair import NUM_VOCAB_TOKENS, random_llama, save, train_tokenizer

PERIOD = 6
# The logit of an estimate that is certainly positive.
SURE = 20.0


def successor(token_id: int, step: int = 1) -> int:
    """The token after this one; 0 would end a row."""
    return 1 + (token_id - 1 + step) % (NUM_VOCAB_TOKENS - 1)


def drafts_successor(token_id: int) -> int:
    """The draft's next token: after every sixth token it is one that the target rejects."""
    return successor(token_id, 2 if token_id % PERIOD == 0 else 1)


def write_chain_pair(folder: Path) -> tuple[Path, Path]:
    """Folders of the target and the draft."""
    tokenizer = train_tokenizer()
    target = save(folder / "target", _chain_model(successor), tokenizer)
    return target, save(folder / "draft", _chain_model(drafts_successor), tokenizer)


def write_trusting_head(folder: Path, draft_folder: Path) -> Path:
    """A verifier that never doubts."""
    folder.mkdir(parents=True)
    draft = open_checkpoint("--draft", str(draft_folder))
    head = random_head(draft.config, spread=0.0, offset=SURE)
    identity = identify_draft(draft)
    info = HeadInfo(
        kind="verifier",
        depth=1,
        hidden_size=identity.hidden_size,
        draft=identity,
        weights_sha256=save_weights(head, folder),
        uses_features=False,
        max_ratio=1.2,
    )
    info.write(folder)
    return folder


def generate_at_known_costs(arguments: Sequence[str]) -> int:
    """The job, in a process of its own, where a pass of the target takes as long as twenty of the draft: how
    far the draft works ahead follows from measured times, which are another machine's on another machine."""
    costs = CostModel(Curve([1, 1000], [20_000_000] * 2), Curve([1, 1000], [1_000_000] * 2))
    replica.measure_costs = lambda *_, **__: costs  # type: ignore[assignment]
    return main(arguments)


@torch.no_grad()
def _chain_model(follows: Callable[[int], int]) -> PreTrainedModel:
    model = random_llama(tie_word_embeddings=False)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    # While their root mean square is 1, the last norm leaves them unchanged; the product of two equal ones of
    # them is then 64, and of a token with another one 8 on average and 40 at most.
    embedding = torch.randn(NUM_VOCAB_TOKENS, 64, generator=torch.Generator().manual_seed(1))
    embedding /= embedding.square().mean(dim=1, keepdim=True).sqrt()
    model.model.embed_tokens.weight.copy_(embedding)
    model.model.norm.weight.fill_(1.0)
    model.lm_head.weight.zero_()
    for token_id in range(NUM_VOCAB_TOKENS):
        model.lm_head.weight[follows(token_id)] += embedding[token_id]
    return model
