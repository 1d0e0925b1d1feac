"""The kinds of drafters that :mod:`tests.lab.train_drafter` trains: how they begin, what they say of texts,
and their files, which have the published forms. Their layers begin as the last ones of the target, which read
what it knows; embeddings and output heads are the target's.

A texts, T tokens of each, N places of each at which is drafted, D tokens drafted there, E hidden size, S
numbers of the states, H heads, G key/value heads, W head width, Q queries of a place, M keys of its own.
"""

from __future__ import annotations

import copy
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel, Qwen2ForCausalLM

from specdist.models.draft_models.block import BlockDrafter
from specdist.models.draft_models.block_config import published_config
from specdist.models.draft_models.eagle3 import LlamaForCausalLMEagle3
from specdist.models.draft_models.layers import Attend, DrafterLayer, Rotation
from tests.engine.mtp import MiMoConfig, mtp_head, save_head, write_code

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps", "max_position_embeddings", "rope_parameters", "bos_token_id", "eos_token_id",
)  # fmt: skip


class Kind(ABC):
    """One of them, for a target of the Llama family.

    Attributes:
        state_layers: the states that go into these layers are read; None: what the output head reads.
        config: as it is written.
    """

    model: Any
    config: dict[str, Any]

    def __init__(self, target: PreTrainedModel, num_drafted: int) -> None:
        self.target, self.num_drafted = target, num_drafted
        self.last = target.config.num_hidden_layers - 1
        self.state_layers: list[int] | None = [2, (self.last + 1) // 2, self.last]
        self.sizes = {name: getattr(target.config, name) for name in SIZES}

    @abstractmethod
    def hidden(self, token_ids_AT: Tensor, states_ATS: Tensor, anchors_AN: Tensor) -> Tensor:
        """[A, N, D, E]: what the output head reads for the tokens after these places. The target has run the
        tokens before an anchor, and the anchor itself is known."""

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=1))
        weights = {name: each.to(self.target.dtype) for name, each in self.model.named_parameters()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    def _begin(self, **parts: str) -> None:
        """With the target's vocabulary, and these parts of the target as far as shapes are the same."""
        for name in ("input_embeddings", "output_embeddings"):
            weight = getattr(self.target, f"get_{name}")().weight.detach().float()
            getattr(self.model, f"get_{name}")().weight = nn.Parameter(weight.clone(), requires_grad=False)
        for name, part in parts.items():
            own = self.model.get_submodule(name.replace("__", "."))
            shapes = {each: weight.shape for each, weight in own.state_dict().items()}
            state = self.target.model.get_submodule(part).state_dict()
            fitting = {each: weight for each, weight in state.items() if shapes.get(each) == weight.shape}
            own.load_state_dict(fitting, strict=False)


def take_last(projection: nn.Linear) -> None:
    """Of states side by side the last one, and little of the others."""
    with torch.no_grad():
        size = projection.out_features
        projection.weight.mul_(0.1)[:, -size:] = torch.eye(size)


def attend(borders_AN: Tensor, queries: Tensor, contexts: Sequence[Tensor], own: Sequence[Tensor]) -> Tensor:
    """[A × N × Q, H × W]: of a place's queries [A × N × Q, H, W], which see the tokens of contexts before its
    border, whose keys and values are [A × T, G, W], and all of its own [A, N, M, G, W]."""
    keys, values = (each.unflatten(0, (len(borders_AN), -1)) for each in contexts)
    (num_heads, width), num_tokens, num_groups = queries.shape[1:], *keys.shape[1:3]
    queries = queries.view(*borders_AN.shape, -1, num_groups, num_heads // num_groups, width) * width**-0.5
    scores = torch.einsum("anqgrw,atgw->anqgrt", queries, keys)
    is_after = torch.arange(num_tokens) >= borders_AN[:, :, None, None, None, None]
    own_scores = torch.einsum("anqgrw,anmgw->anqgrm", queries, own[0])
    scores = torch.cat([scores.masked_fill(is_after, -torch.inf), own_scores], dim=-1)
    shares = scores.softmax(dim=-1).to(values.dtype)
    found = torch.einsum("anqgrt,atgw->anqgrw", shares[..., :num_tokens], values)
    found = found + torch.einsum("anqgrm,anmgw->anqgrw", shares[..., num_tokens:], own[1])
    return found.reshape(-1, num_heads * width)


class DFlash(Kind):
    """All tokens in one pass; in speculators' format."""

    num_layers = 3

    def __init__(self, target: PreTrainedModel, num_drafted: int) -> None:
        super().__init__(target, num_drafted)
        self.config = {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "speculators_config": {"algorithm": "dflash"},
            "draft_vocab_size": target.config.vocab_size,
            "block_size": num_drafted + 1,
            "mask_token_id": target.config.eos_token_id,
            "aux_hidden_state_layer_ids": self.state_layers,
            "transformer_layer_config": self.sizes
            | {"model_type": "qwen3", "num_hidden_layers": self.num_layers},
        }
        self.model = BlockDrafter(published_config(self.config)).float()
        first = self.last + 1 - self.num_layers
        layers = {f"layers__{index}": f"layers.{first + index}" for index in range(self.num_layers)}
        self._begin(**layers, norm="norm", hidden_norm=f"layers.{self.last}.input_layernorm")
        take_last(self.model.fc)

    def hidden(self, token_ids_AT: Tensor, states_ATS: Tensor, anchors_AN: Tensor) -> Tensor:
        size = self.num_drafted + 1
        positions = torch.arange(token_ids_AT.shape[1]).repeat(len(token_ids_AT))
        contexts = list(self.model.contexts(states_ATS.flatten(0, 1), positions))
        ids = torch.full((*anchors_AN.shape, size), self.model.config.mask_token_id)
        ids[:, :, 0] = token_ids_AT.gather(1, anchors_AN)
        places = anchors_AN[:, :, None] + torch.arange(size)

        def attend_block(layer: int, queries: Tensor, *own: Tensor) -> Tensor:
            parts = [each.view(*ids.shape, *each.shape[1:]) for each in own]
            return attend(anchors_AN, queries, contexts[layer], parts).view_as(queries)

        found: Tensor = self.model.block(ids.flatten(), places.flatten(), attend_block)
        return found.view(*ids.shape, -1)[:, :, 1:]


class Chain(Kind):
    """One layer that drafts token by token; its outputs stand for the states that the target has not made."""

    def kept(self, states: Tensor) -> Tensor:
        """[.., E]: of the target's states."""
        return states

    @abstractmethod
    def outputs(
        self, token_ids_T: Tensor, states_TE: Tensor, positions_T: Tensor, attend: Attend, index_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[N, E] twice: the states that stand for the target's, and what the output head reads."""

    def hidden(self, token_ids_AT: Tensor, states_ATS: Tensor, anchors_AN: Tensor) -> Tensor:
        num_texts, num_tokens = token_ids_AT.shape
        kept_ATE, contexts, own = self.kept(states_ATS), [], []

        def keep(layer: int, queries: Tensor, *heads: Tensor) -> Tensor:
            contexts.extend(heads)
            return queries

        def attend_step(layer: int, queries: Tensor, *heads: Tensor) -> Tensor:
            own.append([each.view(*anchors_AN.shape, 1, *each.shape[1:]) for each in heads])
            parts = [torch.cat(each, dim=2) for each in zip(*own, strict=True)]
            return attend(anchors_AN - 1, queries, contexts, parts).view_as(queries)

        # A token is run with the state before it, at the position of that.
        following, positions = token_ids_AT.roll(-1, dims=1), torch.arange(num_tokens).repeat(num_texts)
        self.outputs(following.flatten(), kept_ATE.flatten(0, 1), positions, keep, positions[:0])
        index = (anchors_AN - 1)[:, :, None].expand(-1, -1, kept_ATE.shape[-1])
        states, found = kept_ATE.gather(1, index).flatten(0, 1), []
        for step in range(self.num_drafted):
            token_ids = token_ids_AT.gather(1, (anchors_AN + step).clamp(max=num_tokens - 1)).flatten()
            before, all_ids = (anchors_AN + step - 1).flatten(), torch.arange(len(token_ids))
            states, read = self.outputs(token_ids, states, before, attend_step, all_ids)
            found.append(read.view(*anchors_AN.shape, -1))
        return torch.stack(found, dim=2)


class Eagle3(Chain):
    """In the published layout."""

    def __init__(self, target: PreTrainedModel, num_drafted: int) -> None:
        super().__init__(target, num_drafted)
        self.config = self.sizes | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": target.config.vocab_size,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": self.state_layers},
        }
        self.model = LlamaForCausalLMEagle3(LlamaConfig(**self.config)).float()
        last = f"layers.{self.last}"
        self._begin(norm="norm", midlayer=last, midlayer__hidden_norm=f"{last}.input_layernorm")
        take_last(self.model.fc)

    def kept(self, states: Tensor) -> Tensor:
        return self.model.fused(states)  # type: ignore[no-any-return]

    def outputs(
        self, token_ids_T: Tensor, states_TE: Tensor, positions_T: Tensor, attend: Attend, index_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        rotation = self.model.rotation(positions_T)
        found = self.model.draft(token_ids_T, states_TE, rotation, index_N, attend)
        return found, self.model.norm(found)


class Mtp(Chain):
    """A head in the files of the target, which is written as one of MiMo's family: Qwen2's layers, whose
    biases are zero, compute what Llama's do."""

    def __init__(self, target: PreTrainedModel, num_drafted: int) -> None:
        super().__init__(target, num_drafted)
        self.state_layers = None
        tied, num_layers = target.config.tie_word_embeddings, self.last + 1
        config = MiMoConfig(**self.sizes, num_hidden_layers=num_layers, tie_word_embeddings=tied)
        self.renamed = Qwen2ForCausalLM(config).float()
        self.renamed.load_state_dict(target.state_dict(), strict=False)
        self.model = mtp_head(self.renamed)
        inner = self.model.model
        self._begin(model__layers__0=f"layers.{self.last}", model__norm="norm")
        with torch.no_grad():
            for name, weight in [*self.renamed.named_parameters(), *self.model.named_parameters()]:
                if name.endswith("bias"):
                    weight.zero_()
            for norm in (self.model.mtp.enorm, self.model.mtp.hnorm):
                norm.weight.fill_(1)
            self.model.mtp.eh_proj.weight.copy_(torch.eye(target.config.hidden_size).repeat(1, 2))
        self.layer = DrafterLayer(LlamaConfig(**self.sizes), 0)
        for name in ("mlp", "input_layernorm", "post_attention_layernorm"):
            self.layer.add_module(name, inner.layers[0].get_submodule(name))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.layer.self_attn.add_module(name, inner.layers[0].self_attn.get_submodule(name))

    def outputs(
        self, token_ids_T: Tensor, states_TE: Tensor, positions_T: Tensor, attend: Attend, index_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        joined = self.model.mtp(self.model.get_input_embeddings()(token_ids_T), states_TE)
        rotation = Rotation.at(positions_T, self.model.model.rotary_emb, joined)
        found = self.layer(joined, self.layer.input_layernorm(joined), rotation, attend, index_N)
        read = self.model.model.norm(found)
        return read, read

    def save(self, folder: Path) -> None:
        self.renamed.to(self.target.dtype).save_pretrained(folder)
        save_head(copy.deepcopy(self.model).to(self.target.dtype), "mimo", self.last + 1, folder)
        write_code(folder)
        for path in Path(self.target.config.name_or_path).glob("*token*.json"):
            shutil.copy(path, folder)


KINDS: dict[str, type[Kind]] = {"dflash": DFlash, "mtp": Mtp, "eagle3": Eagle3}
