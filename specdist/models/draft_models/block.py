"""Drafters that propose a block in one pass: DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147).

Hidden states of some of the target's layers, joined and projected, are the context: every layer makes keys
and values of them, at the positions of their tokens. A block stands after the context: the next token, which
the target has not run yet, then mask tokens. Its tokens see the whole context, and each other in both
directions. So all of a block's distributions are known before anything is drawn, and in DFlash none depends
on what is drawn. DSpark's *Markov head* adds to the logits of a token what it reads of the token before it.

Checkpoints have the names, shapes and layers of the published ones: Qwen3's, without a causal mask. Their
configurations, of speculators and of DFlash's authors, are not read by transformers: both become one, that of
the draft's layers (Qwen3's, or Llama's), with what the drafter needs beside it.

A sequences, B tokens of a block, T tokens of contexts, N tokens, E hidden size, S numbers of the states side
by side, H heads, G key/value heads, D head width, V vocabulary of the target, v that of the draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from specdist.models.draft_models.declaration import OwnFilesDrafter, ReadStates
from specdist.models.draft_models.eagle3 import ARCHITECTURES, MASK_TOKEN, NUM_TOKENS, OPTIONS
from specdist.models.draft_models.layers import Attend, DrafterLayer, OwnVocabularyModel, Rotation

GATED = "gated"

SPECULATORS_TYPE = "speculators_model_type"
DFLASH, DSPARK, EAGLE3_TYPE, PEAGLE = "dflash", "dspark", "eagle3", "peagle"
AUTHORS_ARCHITECTURE = "DFlashDraftModel"
VANILLA, LAYERS = "vanilla", "transformer_layer_config"
# What changes nothing of what a drafter computes, or is read elsewhere.
_NEUTRAL = {
    "_name_or_path", "architectures", "auto_map", "dtype", "has_no_defaults_at_init", "model_type",
    "speculators_config", "speculators_model_type", "speculators_version", "tie_word_embeddings",
    "torch_dtype", "transformers_version",
}  # fmt: skip
_READ = {
    "aux_hidden_state_layer_ids", "block_size", "draft_vocab_size", "mask_token_id", "sample_from_anchor",
    "sliding_window_non_causal", "target_hidden_size", LAYERS,
}  # fmt: skip
_READ_OF_DSPARK = {
    "confidence_head_with_markov", "enable_confidence_head", "markov_head_type", "markov_rank",
}  # fmt: skip
_READ_OF_AUTHORS = {"block_size", "mask_token_id", "target_layer_ids"}


class MarkovHead(nn.Module):
    """DSpark's head for what the token before one adds to its logits, in two matrices of a low rank;
    ``gated``: by how much, says the hidden state."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.gate_proj: nn.Linear | None = None
        if config.markov_head_type == GATED:
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)

    def forward(self, token_ids_N: Tensor, hidden_NE: Tensor) -> Tensor:
        """[N, v]: to be added to the logits of these hidden states, after these tokens."""
        read = self.markov_w1(token_ids_N)
        if self.gate_proj is not None:
            read = read * torch.sigmoid(self.gate_proj(torch.cat([hidden_NE, read], dim=-1)))
        added: Tensor = self.markov_w2(read)
        return added


class ConfidenceHead(nn.Module):
    """DSpark's head for how likely the token of a place is accepted, by its hidden state, and perhaps by what
    the Markov head reads of the token before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, features_NF: Tensor) -> Tensor:
        """float32 [N]"""
        estimates: Tensor = self.proj(features_NF)[:, 0].float().sigmoid()
        return estimates


class BlockDrafter(OwnVocabularyModel):
    """The draft, from a configuration of :mod:`specdist.models.draft_models.block`."""

    config_class = Qwen3Config
    config: Qwen3Config

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        num_own = config.draft_vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        state_size = config.target_hidden_size or config.hidden_size
        self.fc = nn.Linear(len(config.state_layers) * state_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(
            [DrafterLayer(config, layer) for layer in range(config.num_hidden_layers)]
        )
        self.hidden_norm, self.norm = (
            Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2)
        )
        self.lm_head = nn.Linear(config.hidden_size, num_own, bias=False)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        width = config.confidence_width
        self.confidence_head = ConfidenceHead(width) if width else None
        self.register_vocabulary(num_own)
        self.post_init()

    def contexts(self, states_TS: Tensor, positions_T: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The keys and values [T, G, D] of every layer, of tokens with these states of the target."""
        joined_TE = self.hidden_norm(self.fc(states_TS))
        rotation = Rotation.at(positions_T, self.rotary_emb, self.fc.weight)
        for layer in self.layers:
            assert isinstance(layer, DrafterLayer)
            yield layer.self_attn.keys_and_values(joined_TE, rotation)

    def block(self, token_ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """[N, E]: the output states of the tokens of blocks, one block after the other."""
        rotation = Rotation.at(positions_N, self.rotary_emb, self.fc.weight)
        hidden_NE = self.embed_tokens(token_ids_N)
        for layer in self.layers:
            assert isinstance(layer, DrafterLayer)
            hidden_NE = layer(hidden_NE, layer.input_layernorm(hidden_NE), rotation, attend)
        normed: Tensor = self.norm(hidden_NE)
        return normed

    def after(self, own_Nv: Tensor, hidden_NE: Tensor, token_ids_N: Tensor) -> Tensor:
        """[N, V]: logits over the target's vocabulary, of a block's logits [N, v] and states, where
        these tokens stand before."""
        if self.markov_head is not None:
            own_Nv = own_Nv + self.markov_head(token_ids_N, hidden_NE)
        return self.whole_logits(own_Nv)

    def estimates(self, hidden_NE: Tensor, token_ids_N: Tensor) -> Tensor | None:
        if self.confidence_head is None:
            return None
        if self.config.confidence_width > self.config.hidden_size:
            assert self.markov_head is not None
            hidden_NE = torch.cat([hidden_NE, self.markov_head.markov_w1(token_ids_N)], dim=-1)
        estimates: Tensor = self.confidence_head(hidden_NE)
        return estimates


ARCHITECTURE = "BlockDrafter"
_EAGLE_LAYERS: dict[Any, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}


class UnknownPart(ValueError):
    """What is not known here of a drafter."""


def published_config(values: Mapping[str, Any]) -> PretrainedConfig | None:
    """The configuration of a config.json; None of one that transformers reads. Raises :class:`UnknownPart`.

    That of a block drafter has, beside Qwen3's attributes, ``state_layers`` (the states are those that go
    into these layers of the target), ``target_hidden_size``, ``block_size``, ``first_row`` (the place in a
    block whose logits are of the token after the next one), ``mask_token_id``, ``draft_vocab_size``,
    ``markov_rank`` (0 without such a head), ``markov_head_type`` and ``confidence_width`` (of what a
    confidence head reads, 0 without one).
    """
    kind = values.get(SPECULATORS_TYPE)
    if kind is None and AUTHORS_ARCHITECTURE not in (values.get("architectures") or ()):
        return None
    if kind in (EAGLE3_TYPE, PEAGLE):
        return _eagle_config(values)
    if kind not in (None, DFLASH, DSPARK):
        known = f"{DFLASH}, {DSPARK}, {EAGLE3_TYPE} and {PEAGLE}"
        raise UnknownPart(f"{SPECULATORS_TYPE} {kind}, and {known} are read here")
    layers, own = _parts(values)
    config = Qwen3Config(**{name: value for name, value in layers.items() if name not in _NEUTRAL})
    state_layers = own.get("aux_hidden_state_layer_ids")
    unknown = [name for name, value in own.items() if value and name not in _READ | _READ_OF_DSPARK]
    wrong = [f"{name}, which is not known here" for name in unknown]
    if set(config.layer_types) != {"full_attention"}:
        wrong.append("layers with a sliding window, which are not read here")
    if own.get("markov_rank") and own.get("markov_head_type", VANILLA) not in (VANILLA, GATED):
        wrong.append(f"markov_head_type {own['markov_head_type']}, which is not read here")
    reads_markov = own.get("confidence_head_with_markov") and own.get("enable_confidence_head")
    if reads_markov and not own.get("markov_rank"):
        wrong.append("confidence_head_with_markov without a Markov head (markov_rank)")
    wrong += [f"no {name}" for name in ("block_size", "mask_token_id") if type(own.get(name)) is not int]
    if not state_layers or not all(type(layer) is int for layer in state_layers):
        wrong.append("no layers of the target whose states are read")
    if wrong:
        raise UnknownPart("; ".join(wrong))
    assert state_layers is not None
    block_size, samples_anchor = own["block_size"], bool(own.get("sample_from_anchor"))
    if block_size < 2 - samples_anchor:
        raise UnknownPart(f"block_size {block_size}, in which nothing is drafted")
    more = {
        "architectures": [ARCHITECTURE],
        "state_layers": tuple(state_layers),
        "target_hidden_size": own.get("target_hidden_size"),
        "block_size": block_size,
        "first_row": 0 if samples_anchor else 1,
        "mask_token_id": own["mask_token_id"],
        "draft_vocab_size": own.get("draft_vocab_size") or config.vocab_size,
        "markov_rank": own.get("markov_rank") or 0,
        "markov_head_type": own.get("markov_head_type", VANILLA),
        "confidence_width": bool(own.get("enable_confidence_head"))
        * (config.hidden_size + bool(reads_markov) * (own.get("markov_rank") or 0)),
        "dtype": values.get("dtype") or values.get("torch_dtype"),
    }
    for name, value in more.items():
        setattr(config, name, value)
    return config


def _eagle_config(values: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration of speculators' EAGLE-3 and P-EAGLE, as their authors have it."""
    layers, own = _parts(values)
    family = layers.pop("model_type", "qwen3")
    unknown = [name for name, value in own.items() if value and name not in {*OPTIONS, LAYERS}]
    wrong = [f"{name}, which is not known here" for name in unknown]
    if family not in _EAGLE_LAYERS:
        wrong.append(f"layers of {family}, and those of {' and '.join(_EAGLE_LAYERS)} are read here")
    is_parallel = values[SPECULATORS_TYPE] == PEAGLE
    if is_parallel and type(own.get(MASK_TOKEN)) is not int:
        wrong.append(f"no {MASK_TOKEN}")
    if wrong:
        raise UnknownPart("; ".join(wrong))
    layers = {name: value for name, value in layers.items() if name not in _NEUTRAL}
    config = _EAGLE_LAYERS[family](**layers | {name: own.get(name) for name in OPTIONS})
    methods = (values.get("speculators_config") or {}).get("proposal_methods") or [{}]
    setattr(config, NUM_TOKENS, methods[0].get("speculative_tokens"))
    config.architectures, config.dtype = [ARCHITECTURES[0]], values.get("dtype") or values.get("torch_dtype")
    return config


def _parts(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration of the layers, and what is the drafter's own, as speculators names it."""
    if values.get(SPECULATORS_TYPE) in (DFLASH, DSPARK, EAGLE3_TYPE, PEAGLE):
        common = set(PretrainedConfig().to_dict())
        own = {name: value for name, value in values.items() if name not in _NEUTRAL | common}
        own["draft_vocab_size"] = values.get("draft_vocab_size")
        if values[SPECULATORS_TYPE] == DSPARK:
            heads = {"enable_confidence_head": True, "confidence_head_with_markov": True}
            own = {"markov_rank": 256, "sample_from_anchor": True} | heads | own
        layers = own.get(LAYERS)
        if not isinstance(layers, dict):
            raise UnknownPart(f"no {LAYERS}")
        return dict(layers), own
    given = values.get("dflash_config") or {}
    own = {name: value for name, value in given.items() if name not in _READ_OF_AUTHORS}
    own |= {
        "block_size": given.get("block_size", values.get("block_size")),
        "mask_token_id": given.get("mask_token_id"),
        # They name the layers that states come out of.
        "aux_hidden_state_layer_ids": [layer + 1 for layer in given.get("target_layer_ids") or ()],
    }
    left_out = {"auto_map", "block_size", "dflash_config", "num_target_layers"}
    return {name: value for name, value in values.items() if name not in left_out}, own


class Block(OwnFilesDrafter):
    """Drafts blocks: DFlash and DSpark."""

    what = "a block drafter (DFlash, DSpark)"
    drafts_blocks = takes_head = True
    # The target's, for training.
    unused_names = ("verifier_norm.", "verifier_lm_head.")

    def fits(self, config: Any) -> bool:
        return (getattr(config, "architectures", None) or [None])[0] == ARCHITECTURE

    def build(self, config: Any, **options: Any) -> PreTrainedModel:
        del options
        return BlockDrafter(config)

    def read_states(self, config: Any, num_target_layers: int) -> ReadStates:
        layers = tuple(sorted(config.state_layers))
        if len(set(layers)) < len(layers) or not 0 <= layers[0] <= layers[-1] < num_target_layers:
            shown = ", ".join(map(str, config.state_layers))
            raise ValueError(
                f"the draft reads the states before layers {shown}, and the target has {num_target_layers}"
            )
        return ReadStates(layers)

    def num_read_numbers(self, config: Any) -> int:
        return len(config.state_layers) * self.state_size(config)

    def num_kept_numbers(self, config: Any) -> int:
        return 0

    def max_draft_tokens(self, config: Any) -> int:
        return int(config.block_size) - int(config.first_row)


BLOCK = Block()
