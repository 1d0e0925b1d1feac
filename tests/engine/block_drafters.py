"""Tiny block drafters, an engine on one, and what a block must say, computed anew from whole texts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.draft_models.block import BLOCK, BlockDrafter, published_config
from specdist.models.drafters.runner import DrafterRunner
from specdist.policies import DraftSequences, Goodput, VerifiedTokens
from specdist.policies.costs import CostModel, Curve
from tests.engine.eagle import MASK_ID, Drafted, EagleHarness, common_values, layer_of, norm_of, uneven

LAYERS = [2, 0, 1]
BLOCK_SIZE = 5


def speculators_values(target: PreTrainedModel, num_ids: int, **changes: Any) -> dict[str, Any]:
    """A config.json as speculators writes it."""
    own = {
        "architectures": ["DFlashSpeculator"],
        "auto_map": {"": "dflash.DFlashSpeculatorConfig"},
        "speculators_model_type": "dflash",
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "target"}},
        "aux_hidden_state_layer_ids": LAYERS,
        "block_size": BLOCK_SIZE,
        "mask_token_id": MASK_ID,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
    }
    return common_values(target, num_ids) | own | changes


def authors_values(target: PreTrainedModel, layers: list[int]) -> dict[str, Any]:
    """A config.json as DFlash's authors write it: with custom code, which nothing here needs."""
    return speculators_values(target, target.config.vocab_size)["transformer_layer_config"] | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": BLOCK_SIZE,
        "num_target_layers": target.config.num_hidden_layers,
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": layers},
    }


DSPARK = {
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    "sample_from_anchor": True,
    "markov_rank": 6,
    "markov_head_type": "gated",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def block_drafter(
    target: PreTrainedModel, ids: Sequence[int], *, scale: float = 1.0, **changes: Any
) -> BlockDrafter:
    """A random draft that knows these ids."""
    torch.manual_seed(5)
    published = published_config(speculators_values(target, len(ids), **changes))
    drafter: BlockDrafter = uneven(BlockDrafter(published), target, ids, scale)
    return drafter


class BlockHarness(EagleHarness):
    """An engine whose draft proposes blocks; ``blocks``: all that was drafted."""

    def __init__(self, target: PreTrainedModel, draft: BlockDrafter, **options: Any) -> None:
        most = BLOCK.max_draft_tokens(draft.config)
        super().__init__(target, draft, **{"num_draft_tokens": most, **options})

    def runner_of(self, draft: PreTrainedModel) -> DrafterRunner:
        return DrafterRunner(copy.deepcopy(draft).to(self.device), self.device, BLOCK)


def goodput(max_draft_tokens: int, num_rows: int, *, is_coupled: bool = False, kind: type = Goodput) -> Any:
    """Costs under which blocks of all lengths occur, in batches of so many sequences."""
    target = Curve([1, 1 + 6 * num_rows], [2000, 2000 + 2400])
    costs = CostModel(target, Curve([1, 1 + num_rows], [2, 40]))
    return kind(max_draft_tokens=max_draft_tokens, costs=costs, is_coupled=is_coupled)


class WatchedGoodput(Goodput):
    """``asked``: confidences, by the number of committed tokens; ``verified``: estimates that came back, with
    their depths. For one sequence at a time."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.asked: dict[int, np.ndarray] = {}
        self.verified: list[tuple[int, float]] = []

    def num_to_draw(self, rows: DraftSequences, confidences_RB: np.ndarray) -> np.ndarray:
        self.asked[int(rows.round.num_context_tokens)] = confidences_RB[0].copy()
        return super().num_to_draw(rows, confidences_RB)

    def observe_tokens(self, tokens: VerifiedTokens) -> None:
        assert tokens.features.estimates is not None
        estimates = tokens.features.estimates.tolist()
        self.verified += list(zip(tokens.depths_C.tolist(), estimates, strict=True))
        super().observe_tokens(tokens)


@torch.inference_mode()
def expected_probabilities(target: PreTrainedModel, draft: BlockDrafter, block: Drafted) -> list[float]:
    """Of a block's candidates. The target has run all committed tokens but the last."""
    weights, known, outputs = _outputs(target, draft, block.committed)
    probabilities, before = [], block.committed[-1]
    for row, candidate in zip(outputs, block.candidates, strict=False):
        own_v = _logits(draft, weights, row, before).softmax(dim=-1)
        probabilities.append(float(own_v[known.index(candidate)]) if candidate in known else 0.0)
        before = candidate
    return probabilities


@torch.inference_mode()
def expected_confidences(
    target: PreTrainedModel, draft: BlockDrafter, committed: list[int], temperature: float
) -> list[float]:
    """Of all places of a block, each after the likeliest token of the place before."""
    weights, known, outputs = _outputs(target, draft, committed)
    confidences, before = [], committed[-1]
    for row in outputs:
        logits = _logits(draft, weights, row, before)
        if draft.config.confidence_width:
            read = torch.cat([row, weights["markov_head.markov_w1.weight"][before]])
            height = (
                weights["confidence_head.proj.weight"][0] @ read + weights["confidence_head.proj.bias"][0]
            )
            confidences.append(float(1 / (1 + torch.exp(-height))))
        else:
            confidences.append(float((logits / temperature).softmax(dim=-1).max()))
        before = known[int(logits.argmax())]
    return confidences


def _logits(draft: BlockDrafter, weights: dict[str, Tensor], row: Tensor, before: int) -> Tensor:
    """[v]: of a place with this output, after a token."""
    logits = row @ weights["lm_head.weight"].T
    if not draft.config.markov_rank:
        return logits
    read = weights["markov_head.markov_w1.weight"][before]
    joined = torch.cat([row, read]) @ weights["markov_head.gate_proj.weight"].T
    read = read * torch.sigmoid(joined + weights["markov_head.gate_proj.bias"])
    return logits + read @ weights["markov_head.markov_w2.weight"].T


def _outputs(
    target: PreTrainedModel, draft: BlockDrafter, tokens: list[int]
) -> tuple[dict[str, Tensor], list[int], Tensor]:
    """The draft's weights and ids, and the outputs [P, E] of the block after these tokens, from one pass over
    the whole text, without a cache, in float64 and in formulas of Qwen3 and of the papers."""
    config = draft.config
    weights = {name: weight.double() for name, weight in draft.state_dict().items()}
    committed = torch.tensor(tokens)
    found = target(committed[None, :-1], output_hidden_states=True).hidden_states
    states = torch.cat([found[layer][0].double() for layer in sorted(config.state_layers)], dim=-1)
    contexts = norm_of(states @ weights["fc.weight"].T, weights["hidden_norm.weight"], config)
    ids = torch.tensor([tokens[-1], *[config.mask_token_id] * (config.block_size - 1)])
    hidden = weights["embed_tokens.weight"][ids]
    for layer in range(config.num_hidden_layers):
        own = {name.removeprefix(f"layers.{layer}."): weight for name, weight in weights.items()}
        inputs = norm_of(hidden, own["input_layernorm.weight"], config)
        hidden = layer_of(own, config, inputs, hidden, contexts)
    outputs = norm_of(hidden, weights["norm.weight"], config)
    known = (torch.arange(config.draft_vocab_size) + draft.d2t).tolist()
    return weights, known, outputs[config.first_row :]
