"""The kinds of small drafters that :mod:`tests.lab.train_drafter` trains: how they begin, what they say of a
text, and their files, as published ones are.

A texts, T tokens of each, N places of each at which is drafted, D tokens drafted there, E hidden size, S
numbers of the target's states side by side.
"""

from __future__ import annotations

import copy
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel, Qwen2ForCausalLM

from specdist.models.drafters.blocks.block import BlockDrafter
from specdist.models.drafters.blocks.block_config import published_config
from specdist.models.drafters.eagle3 import LlamaForCausalLMEagle3, Rotation
from tests.engine.mtp import MiMoConfig, mtp_head, save_head, write_code

SIZES = (
    "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "max_position_embeddings", "rope_parameters",
)  # fmt: skip
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


class Kind(ABC):
    """One of them, for a target of the Llama family.

    Attributes:
        state_layers: the states that go into these layers are read; None: what the output head reads.
    """

    state_layers: tuple[int, ...] | None
    model: Any

    def __init__(self, target: PreTrainedModel, num_drafted: int) -> None:
        self.target, self.num_drafted = target, num_drafted
        num_layers = target.config.num_hidden_layers
        self.state_layers = (2, num_layers // 2, num_layers - 1)

    @abstractmethod
    def hidden(self, token_ids_AT: Tensor, states_ATS: Tensor, anchors_AN: Tensor) -> Tensor:
        """[A, N, D, E]: what the output head reads for the tokens after these places. The target has run the
        tokens before an anchor, and the anchor itself is known."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """As the kind is published."""

    def _share_vocabulary(self) -> None:
        for part in ("input_embeddings", "output_embeddings"):
            weight = getattr(self.target, f"get_{part}")().weight.detach().float()
            getattr(self.model, f"get_{part}")().weight = nn.Parameter(weight.clone(), requires_grad=False)

    def _copy(self, part: str, own: nn.Module) -> None:
        """The weights of a part of the target; what ``own`` has beside them stays."""
        state = self.target.model.get_submodule(part).state_dict()
        own.load_state_dict({name: weight.float() for name, weight in state.items()}, strict=False)

    def _config(self, **more: Any) -> dict[str, Any]:
        text = self.target.config
        return {name: getattr(text, name) for name in SIZES} | {"intermediate_size": text.intermediate_size} | more

    def _write(self, folder: Path, config: dict[str, Any], skipped: Iterable[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        weights = {
            name: (weight.bfloat16() if weight.is_floating_point() else weight).contiguous()
            for name, weight in self.model.state_dict().items()
            if name not in set(skipped)
        }
        save_file(weights, folder / "model.safetensors", {"format": "pt"})


def attend(
    anchors_AN: Tensor, queries: Tensor, contexts: Sequence[Tensor], own: Sequence[Tensor]
) -> Tensor:
    """[A × N × Q, H × W]: of the Q queries [A × N × Q, H, W] of every anchor, which see the tokens before it among
    the contexts, whose keys and values are [A × T, G, W], and all of its own, [A, N, M, G, W]."""
    (num_texts, num_anchors), (num_heads, width) = anchors_AN.shape, queries.shape[1:]
    num_groups = contexts[0].shape[1]
    keys, values = (each.unflatten(0, (num_texts, -1)).transpose(1, 2) for each in contexts)  # [A, G, T, W]
    own_keys, own_values = (each.transpose(2, 3) for each in own)  # [A, N, G, M, W]
    per_group = num_heads // num_groups
    heads = queries.view(num_texts, num_anchors, -1, num_groups, per_group, width) * width**-0.5
    by_group = heads.permute(0, 1, 3, 2, 4, 5).flatten(3, 4)  # [A, N, G, Q × R, W]
    together = by_group.transpose(1, 2).flatten(2, 3)  # [A, G, N × Q × R, W]
    scores = (together @ keys.mT).unflatten(2, (num_anchors, -1)).transpose(1, 2)
    is_after = torch.arange(keys.shape[2]) >= anchors_AN[:, :, None, None, None]
    scores = torch.cat([scores.masked_fill(is_after, -torch.inf), by_group @ own_keys.mT], dim=-1)
    shares = scores.softmax(dim=-1).to(values.dtype)
    of_context, of_own = shares.split([keys.shape[2], own_keys.shape[3]], dim=-1)
    found = (of_context.transpose(1, 2).flatten(2, 3) @ values).unflatten(2, (num_anchors, -1)).transpose(1, 2)
    found = (found + of_own @ own_values).unflatten(3, (-1, per_group))  # [A, N, G, Q, R, W]
    return found.transpose(2, 3).reshape(-1, num_heads * width)


class DFlash(Kind):
    """All tokens in one pass; in speculators' format."""

    num_layers = 3

    def __init__(self, target: PreTrainedModel, num_drafted: int) -> None:
        super().__init__(target, num_drafted)
        text, size = target.config, num_drafted + 1
        self.config = {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "speculators_config": {
                "algorithm": "dflash",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_drafted}],
                "verifier": {"architectures": text.architectures, "name_or_path": text.name_or_path},
            },
            "draft_vocab_size": text.vocab_size,
            "block_size": size,
            "mask_token_id": text.eos_token_id,
            "aux_hidden_state_layer_ids": list(self.state_layers or ()),
            "transformer_layer_config": self._config(model_type="qwen3", num_hidden_layers=self.num_layers),
        }
        self.model = BlockDrafter(published_config(self.config)).float()
        self._share_vocabulary()
        # The last layers of the target, with what the last one reads.
        first = text.num_hidden_layers - self.num_layers
        for index, layer in enumerate(self.model.layers):
            self._copy(f"layers.{first + index}", layer)
        self._copy("norm", self.model.norm)
        self._copy(f"layers.{text.num_hidden_layers - 1}.input_layernorm", self.model.hidden_norm)
        begin_with_last(self.model.fc)

    def hidden(self, token_ids_AT: Tensor, states_ATS: Tensor, anchors_AN: Tensor) -> Tensor:
        num_texts, num_tokens = token_ids_AT.shape
        config, positions = self.model.config, torch.arange(num_tokens).repeat(num_texts)
        contexts = list(self.model.contexts(states_ATS.flatten(0, 1), positions))
        ids = torch.full((*anchors_AN.shape, config.block_size), config.mask_token_id)
        ids[:, :, 0] = token_ids_AT.gather(1, anchors_AN)
        places = anchors_AN[:, :, None] + torch.arange(config.block_size)

        def attend_layer(layer: int, queries: Tensor, *own: Tensor) -> Tensor:
            parts = [each.view(*places.shape, *each.shape[1:]) for each in own]
            return attend(anchors_AN, queries, contexts[layer], parts).view_as(queries)

        found: Tensor = self.model.block(ids.flatten(), places.flatten(), attend_layer)
        return found.view(*places.shape, -1)[:, :, 1:]

    def save(self, folder: Path) -> None:
        self._write(folder, self.config, ("d2t", "t2d"))


def begin_with_last(projection: nn.Linear) -> None:
    """Of states side by side the last one, and little of the others."""
    with torch.no_grad():
        size = projection.out_features
        projection.weight.mul_(0.1)[:, -size:] = torch.eye(size)


class Chain(Kind):
    """A layer that drafts token by token; its own outputs stand for states that the target has not made."""

    layer: Any
    rotary: nn.Module

    @abstractmethod
    def kept(self, states: Tensor) -> Tensor:
        """[.., E]: of the target's states."""

    @abstractmethod
    def inputs(self, token_ids_T: Tensor, states_TE: Tensor) -> tuple[Tensor, Tensor]:
        """What attention's outputs are added to, and what attention reads."""

    @abstractmethod
    def outputs(self, outputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        """The states that the next step reads, and what the output head reads."""

    def hidden(self, token_ids_AT: Tensor, states_ATS: Tensor, anchors_AN: Tensor) -> Tensor:
        num_texts, num_tokens = token_ids_AT.shape
        kept_ATE = self.kept(states_ATS)
        following = token_ids_AT.roll(-1, dims=1).flatten()
        positions = torch.arange(num_tokens).repeat(num_texts)
        contexts = self._keys_and_values(following, kept_ATE.flatten(0, 1), positions)
        own = [each.new_empty(*anchors_AN.shape, 0, *each.shape[1:]) for each in contexts]
        index = (anchors_AN - 1)[:, :, None].expand(-1, -1, kept_ATE.shape[-1])
        states, found = kept_ATE.gather(1, index).flatten(0, 1), []
        for step in range(self.num_drafted):
            places = (anchors_AN + step).clamp(max=num_tokens - 1)
            token_ids, positions = token_ids_AT.gather(1, places).flatten(), (anchors_AN - 1 + step).flatten()
            if step:
                added = self._keys_and_values(token_ids, states, positions)
                own = [
                    torch.cat([before, each.view(*anchors_AN.shape, 1, *each.shape[1:])], dim=2)
                    for before, each in zip(own, added, strict=True)
                ]
            incoming, inputs = self.inputs(token_ids, states)
            attended = attend(anchors_AN, self._heads("q_proj", inputs, positions), contexts, own)
            outputs = incoming + self.layer.self_attn.o_proj(attended)
            outputs = outputs + self.layer.mlp(self.layer.post_attention_layernorm(outputs))
            states, read = self.outputs(outputs)
            found.append(read.view(*anchors_AN.shape, -1))
        return torch.stack(found, dim=2)

    def _keys_and_values(self, token_ids_T: Tensor, states_TE: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        inputs = self.inputs(token_ids_T, states_TE)[1]
        return self._heads("k_proj", inputs, positions), self._heads("v_proj", inputs)

    def _heads(self, projection: str, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        attention = self.layer.self_attn
        heads = attention.get_submodule(projection)(inputs).unflatten(-1, (-1, attention.head_dim))
        if positions is None:
            return heads
        cosines, sines = self.rotary(inputs, position_ids=positions[None])
        return Rotation(cosines[0], sines[0]).rotate(heads)


class Eagle3(Chain):
    """In the published layout."""

    def __init__(self, target: PreTrainedModel, num_drafted: int) -> None:
        super().__init__(target, num_drafted)
        text, last = target.config, target.config.num_hidden_layers - 1
        self.config = self._config(
            architectures=["LlamaForCausalLMEagle3"],
            model_type="llama",
            num_hidden_layers=1,
            draft_vocab_size=text.vocab_size,
            eagle_config={"eagle_aux_hidden_state_layer_ids": list(self.state_layers or ())},
        )
        self.model = LlamaForCausalLMEagle3(LlamaConfig(**copy.deepcopy(self.config))).float()
        self._share_vocabulary()
        self.layer, self.rotary = self.model.midlayer, self.model.rotary_emb
        begin_with_last(self.model.fc)
        self._copy("norm", self.model.norm)
        self._copy(f"layers.{last}.mlp", self.layer.mlp)
        self._copy(f"layers.{last}.self_attn.o_proj", self.layer.self_attn.o_proj)
        self._copy(f"layers.{last}.post_attention_layernorm", self.layer.post_attention_layernorm)
        self._copy(f"layers.{last}.input_layernorm", self.layer.hidden_norm)
        self._copy("layers.0.input_layernorm", self.layer.input_layernorm)
        # Embeddings are read as by the first layer, states as by the last.
        for name in ("q_proj", "k_proj", "v_proj"):
            parts = [target.model.layers[index].self_attn.get_submodule(name).weight for index in (0, last)]
            weight = torch.cat(parts, dim=1).detach().float()
            self.layer.self_attn.get_submodule(name).load_state_dict({"weight": weight})

    def kept(self, states: Tensor) -> Tensor:
        fused: Tensor = self.model.fc(states)
        return fused

    def inputs(self, token_ids_T: Tensor, states_TE: Tensor) -> tuple[Tensor, Tensor]:
        return states_TE, self.layer.inputs(self.model.embed_tokens(token_ids_T), states_TE)

    def outputs(self, outputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        return outputs_TE, self.model.norm(outputs_TE)

    def save(self, folder: Path) -> None:
        self._write(folder, self.config, ("embed_tokens.weight", "d2t", "t2d"))


class Mtp(Chain):
    """A head in the files of the target, which is written as one of MiMo's family: Qwen2's layers, whose
    biases are zero, compute what Llama's do."""

    def __init__(self, target: PreTrainedModel, num_drafted: int) -> None:
        super().__init__(target, num_drafted)
        self.state_layers = None
        config = MiMoConfig(
            **self._config(num_hidden_layers=target.config.num_hidden_layers),
            tie_word_embeddings=target.config.tie_word_embeddings,
            eos_token_id=target.config.eos_token_id,
            bos_token_id=target.config.bos_token_id,
            pad_token_id=target.config.pad_token_id,
        )
        self.renamed = Qwen2ForCausalLM(config).float()
        with torch.no_grad():
            for name, weight in self.renamed.named_parameters():
                if name.endswith("bias"):
                    weight.zero_()
        left = self.renamed.load_state_dict(target.state_dict(), strict=False)
        assert not left.unexpected_keys and all(name.endswith("bias") for name in left.missing_keys)
        self.model = mtp_head(self.renamed).train()
        self._share_vocabulary()
        self.layer, self.rotary = self.model.model.layers[0], self.model.model.rotary_emb
        self._copy(f"layers.{target.config.num_hidden_layers - 1}", self.layer)
        self._copy("norm", self.model.model.norm)
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if name.endswith("bias"):
                    weight.zero_()
            for norm in (self.model.mtp.enorm, self.model.mtp.hnorm):
                norm.weight.fill_(1)
            size = target.config.hidden_size
            self.model.mtp.eh_proj.weight.copy_(torch.eye(size).repeat(1, 2))

    def kept(self, states: Tensor) -> Tensor:
        return states

    def inputs(self, token_ids_T: Tensor, states_TE: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.model.mtp(self.model.model.embed_tokens(token_ids_T), states_TE)
        return joined, self.layer.input_layernorm(joined)

    def outputs(self, outputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.model.model.norm(outputs_TE)
        return normed, normed

    def save(self, folder: Path) -> None:
        self.renamed.bfloat16().save_pretrained(folder)
        head = copy.deepcopy(self.model).bfloat16()
        save_head(head, "mimo", self.target.config.num_hidden_layers, folder)
        write_code(folder)
        for name in TOKENIZER:
            path = Path(self.target.config.name_or_path) / name
            if path.exists():
                shutil.copy(path, folder / name)


KINDS: dict[str, type[Kind]] = {"dflash": DFlash, "mtp": Mtp, "eagle3": Eagle3}
