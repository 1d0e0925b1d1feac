"""Tiny EAGLE-3 pairs, an engine on one, and what the draft must say, computed anew from whole texts."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from specdist.engine.draft.client import InProcess
from specdist.engine.messages.interfaces import Proposer
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.request import Request
from specdist.engine.times.timeline import Timeline
from specdist.models.draft_models.block import published_config
from specdist.models.draft_models.eagle3 import EAGLE3, LlamaForCausalLMEagle3
from specdist.models.draft_models.eagle3 import PEAGLE as PARALLEL
from specdist.models.draft_models.kinds import drafter_of
from specdist.models.drafters.runner import DrafterRunner
from specdist.models.families.adapters import use_paged_attention
from specdist.models.passes.runner import ModelRunner
from specdist.sampling.distributions import SamplingSettings
from specdist.sampling.processing.row_filters import plain_probabilities
from tests.engine.harness import CPU, Harness, requests_for
from tests.models.families import tiny_model
from tests.statistics import chi_square_p_value

LAYERS = (0, 1, 2)
MASK_ID = 3
PEAGLE = {
    "architectures": ["PEagleSpeculator"],
    "speculators_model_type": "peagle",
    "mask_token_id": MASK_ID,
    "norm_before_residual": False,
}
ALARM = 1e-5
# Samples of short texts, as many at a time as there are.
CROWD = {"max_new_tokens": 4, "max_num_seqs": 400, "max_num_batched_tokens": 3000, "num_pages": 2000}


def drafter_layers(target: PreTrainedModel) -> dict[str, Any]:
    """Layers as wide as the target."""
    return {
        "vocab_size": target.config.vocab_size,
        "hidden_size": target.config.hidden_size,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


def common_values(target: PreTrainedModel, num_ids: int) -> dict[str, Any]:
    """What speculators writes into the config.json of any draft, here with two layers of Qwen3."""
    return {
        "speculators_version": "0.5.0",
        "draft_vocab_size": num_ids,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": drafter_layers(target) | {"model_type": "qwen3", "num_hidden_layers": 2},
    }


def speculators_values(target: PreTrainedModel, num_ids: int, **changes: Any) -> dict[str, Any]:
    """A config.json as speculators writes it: of an EAGLE-3 draft, or as changed."""
    own = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}]},
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": [2, 0, 1],
    }
    return common_values(target, num_ids) | own | changes


def eagle_model(
    target: PreTrainedModel, ids: Sequence[int], *, scale: float = 1.0, **changes: Any
) -> LlamaForCausalLMEagle3:
    """A random draft that knows these ids: of the authors' configuration, or with changes of speculators'."""
    torch.manual_seed(5)
    if changes:
        published = published_config(speculators_values(target, len(ids), **changes))
        kind = drafter_of(published)
        assert kind is not None
        return uneven(kind.build(published), target, ids, scale)
    config = LlamaConfig(
        **drafter_layers(target),
        num_hidden_layers=1,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        draft_vocab_size=len(ids),
        # Whatever their order, the states are in that of the target's layers.
        eagle_aux_hidden_state_layer_ids=[2, 0, 1],
    )
    return uneven(LlamaForCausalLMEagle3(config), target, ids, scale)


@torch.no_grad()
def uneven(model: Any, target: PreTrainedModel, ids: Sequence[int], scale: float) -> Any:
    """The draft with norms that are not all alike, an output head of this scale, the target's embedding, and
    these ids."""
    for name, weight in model.eval().named_parameters():
        if "norm" in name or name == "mask_hidden":
            weight.add_(0.3 * torch.randn(weight.shape))
    model.lm_head.weight.mul_(scale)
    model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
    model.know(torch.tensor(ids))
    return model


def save_published(model: Any, values: dict[str, Any], folder: Path) -> Path:
    """Files as speculators writes them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    weights = {
        name.replace("midlayer.", "layers.0."): weight.contiguous()
        for name, weight in model.state_dict().items()
    }
    if model.config.draft_vocab_size == model.config.vocab_size:
        del weights["d2t"], weights["t2d"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def eagle_target(vocab_size: int, family: str = "llama", **overrides: Any) -> PreTrainedModel:
    return tiny_model(family, seed=3, vocab_size=vocab_size, **overrides)


@dataclass
class Drafted:
    """A block: what stood before it, and its candidates with the draft's probabilities."""

    committed: list[int]
    candidates: list[int]
    probabilities: list[float]


class Watched:
    """A proposer whose blocks are noted."""

    def __init__(self, draft: Proposer, blocks: list[Drafted]) -> None:
        self._draft, self._blocks = draft, blocks

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        request.meanwhile()
        reply = self._draft.propose(request, clock)
        ends = np.cumsum(reply.num_drafted_R)
        for index, sequence in enumerate(request.sequences):
            own = slice(ends[index] - reply.num_drafted_R[index], ends[index])
            self._blocks.append(
                Drafted(
                    [*sequence.token_ids, int(reply.next_token_ids_R[index])],
                    reply.candidate_ids_C[own].tolist(),
                    reply.draft_probabilities_C[own].tolist(),
                )
            )
        return reply

    def close(self) -> None:
        self._draft.close()


class EagleHarness(Harness):
    """An engine whose draft reads the target's states; ``blocks``: all that was drafted."""

    def __init__(self, target: PreTrainedModel, draft: PreTrainedModel, **options: Any) -> None:
        kind = drafter_of(draft.config) or EAGLE3  # whose name only files have
        # So that room for candidates is reserved as for a draft of this kind.
        super().__init__(target, None, **{"num_draft_tokens": 4 if kind.drafts_blocks else 3, **options})
        self.device = options.get("device", CPU)
        most = self.policy.max_draft_tokens
        self.scheduling = replace(self.scheduling, max_draft_tokens=most)
        model = copy.deepcopy(target).to(self.device)
        use_paged_attention(model)
        read = kind.read_states(draft.config, target.config.num_hidden_layers)
        self.target_runner = ModelRunner(model, self.device, reads=read)
        self.draft_runner = self.runner_of(draft)
        self.runners = [self.target_runner, self.draft_runner]
        self.assembly.allocate(self.target_runner)
        self.assembly.allocate_draft(self.draft_runner)
        self.blocks: list[Drafted] = []

    def runner_of(self, draft: PreTrainedModel) -> DrafterRunner:
        kind = PARALLEL if hasattr(draft, "mask_hidden") else EAGLE3
        return DrafterRunner(copy.deepcopy(draft).to(self.device), self.device, kind)

    def proposer(self) -> Proposer:
        worker = self.assembly.draft_worker(self.draft_runner, self.policy)
        return Watched(self.assembly.draft(InProcess(worker), self.target_runner), self.blocks)


@torch.inference_mode()
def expected_probabilities(
    target: PreTrainedModel, draft: LlamaForCausalLMEagle3, block: Drafted, temperature: float = 1.0
) -> list[float]:
    """Of a block's candidates: every one from a pass over the whole text, without a cache, in formulas of the
    papers and of Llama. The target has run all committed tokens but the last."""
    weights = {name: weight.double() for name, weight in draft.state_dict().items()}
    config, committed = draft.config, torch.tensor(block.committed)
    found = target(committed[None, :-1], output_hidden_states=True).hidden_states
    states = _fused(weights, config, torch.cat([found[layer][0].double() for layer in LAYERS], dim=-1))
    tokens, mask = committed[1:], getattr(config, "mask_token_id", None)
    ids = torch.arange(len(weights["d2t"])) + draft.d2t
    if mask is not None:
        # All at once: of tokens that are not known yet the draft has one state, and one id.
        states = torch.cat([states, _fused(weights, config, weights["mask_hidden"][0]).expand(4, -1)])
        outputs = _stack(weights, config, torch.cat([tokens, torch.full((4,), mask)]), states)[-5:]
    probabilities = []
    for depth, candidate in enumerate(block.candidates):
        output = outputs[depth] if mask is not None else _stack(weights, config, tokens, states)[-1]
        is_normed = getattr(config, "norm_output", False)
        logits = output if is_normed else norm_of(output, weights["norm.weight"], config)
        own = (logits @ weights["lm_head.weight"].T / temperature).softmax(dim=-1)
        place = (ids == candidate).nonzero()
        probabilities.append(float(own[place[0, 0]]) if len(place) else 0.0)
        states = torch.cat([states, output[None]])
        tokens = torch.cat([tokens, torch.tensor([candidate])])
    return probabilities


def _fused(weights: dict[str, Tensor], config: Any, states: Tensor) -> Tensor:
    if "input_norm.weight" in weights:
        states = norm_of(states, weights["input_norm.weight"], config)
    if "fc_norm.0.weight" in weights:
        parts = states.unflatten(-1, (3, -1)).unbind(-2)
        normed = [norm_of(part, weights[f"fc_norm.{n}.weight"], config) for n, part in enumerate(parts)]
        states = torch.cat(normed, dim=-1)
    return states @ weights["fc.weight"].T


def _stack(weights: dict[str, Tensor], config: Any, tokens: Tensor, states: Tensor) -> Tensor:
    """Every pair of a token and the state before it, through the layers."""
    names = ["midlayer.", *(f"layers.{layer}." for layer in range(1, config.num_hidden_layers))]
    for name in names:
        own = {each.removeprefix(name): weight for each, weight in weights.items()}
        normed = norm_of(
            states, own["hidden_norm.weight" if name == "midlayer." else "input_layernorm.weight"], config
        )
        if name == "midlayer.":
            if getattr(config, "norm_before_residual", False):
                states = normed
            embedded = norm_of(weights["embed_tokens.weight"][tokens], own["input_layernorm.weight"], config)
            normed = torch.cat([embedded, normed], dim=-1)
        states = layer_of(own, config, normed, states)
    return (
        norm_of(states, weights["norm.weight"], config) if getattr(config, "norm_output", False) else states
    )


def layer_of(
    of: dict[str, Tensor], config: Any, inputs: Tensor, states: Tensor, contexts: Tensor | None = None
) -> Tensor:
    """The outputs of a layer of Llama or Qwen3 with these weights. Tokens see those before them; those of a
    block see all of it, and ``contexts`` before it."""
    seen = inputs if contexts is None else torch.cat([contexts, inputs])
    width, begin = config.head_dim, len(seen) - len(inputs)
    angles = torch.arange(len(seen))[:, None] * 10000.0 ** -(torch.arange(0, width, 2).double() / width)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]

    def heads(name: str, tokens: Tensor, turns: Tensor | None) -> Tensor:
        found = (tokens @ of[f"self_attn.{name}_proj.weight"].T).view(len(tokens), -1, width)
        if f"self_attn.{name}_norm.weight" in of:
            found = norm_of(found, of[f"self_attn.{name}_norm.weight"], config)
        if turns is not None:
            pairs = torch.complex(found[..., : width // 2], found[..., width // 2 :]) * turns
            found = torch.cat([pairs.real, pairs.imag], dim=-1)
        return found

    queries, keys, values = heads("q", inputs, turns[begin:]), heads("k", seen, turns), heads("v", seen, None)
    repeats = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * width**-0.5
    if contexts is None:
        scores = scores.masked_fill(~torch.ones(len(seen), len(seen)).tril().bool(), -torch.inf)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values).flatten(1)
    added = states + attended @ of["self_attn.o_proj.weight"].T
    normed = norm_of(added, of["post_attention_layernorm.weight"], config)
    gates = torch.nn.functional.silu(normed @ of["mlp.gate_proj.weight"].T)
    return added + (gates * (normed @ of["mlp.up_proj.weight"].T)) @ of["mlp.down_proj.weight"].T


def norm_of(values: Tensor, weight: Tensor, config: Any) -> Tensor:
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + config.rms_norm_eps) * weight


def check_blocks(
    replica: EagleHarness,
    requests: Sequence[Request],
    expected: Callable[[Drafted], np.ndarray],
    *,
    is_preempted: bool,
    least: int,
    every: int,
    rtol: float = 2e-4,
) -> None:
    """Of more than ``least`` blocks that are drafted, some accepted and some not, the probabilities of
    each ``every``-th."""
    replica.generate(requests)
    stats = replica.stats_recorder.close_shard(0)
    assert (stats.num_preemptions > 0) == is_preempted
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    drafted = [block for block in replica.blocks if block.candidates]
    assert len(drafted) > least
    for block in drafted[::every]:
        np.testing.assert_allclose(block.probabilities, expected(block), rtol=rtol, atol=1e-6)


def check_distribution(replica: Harness, target: PreTrainedModel, settings: SamplingSettings) -> None:
    """Whole completions of 2,000 samples, against the target's own distribution by enumeration. ``replica``:
    of :data:`CROWD`."""
    prompt = [1, 4, 2]
    completions = replica.generate(requests_for([prompt], num_samples=2000))
    texts = list(itertools.product(range(target.config.vocab_size), repeat=CROWD["max_new_tokens"]))
    index = {text: place for place, text in enumerate(texts)}
    counts = torch.zeros(len(texts), dtype=torch.int64)
    for completion in completions:
        counts[index[tuple(completion.token_ids)]] += 1
    found = chi_square_p_value(counts, text_probabilities(target, settings, prompt, texts))
    assert found > ALARM, found
    stats = replica.stats_recorder.close_shard(0)
    assert 0.1 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9


@torch.inference_mode()
def text_probabilities(
    target: Any, settings: SamplingSettings, prompt: list[int], texts: list[tuple[int, ...]]
) -> torch.Tensor:
    """float64: of every completion."""
    tokens = torch.tensor([[*prompt, *text] for text in texts])
    logits = target(tokens).logits[:, len(prompt) - 1 : -1].flatten(0, 1)
    rows = plain_probabilities(
        logits, temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p
    )
    own = rows.double().gather(1, torch.tensor(texts).flatten()[:, None])
    return own.view(len(texts), -1).prod(dim=1)
