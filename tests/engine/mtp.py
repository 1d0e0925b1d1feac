"""Tiny targets with MTP heads, and what the heads must say, computed anew from whole texts."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from specdist.models.draft_models.mtp import MTP, mtp_config
from specdist.models.drafters.runner import DrafterRunner
from specdist.models.families.adapters import use_paged_attention
from tests.engine.eagle import Drafted, EagleHarness
from tests.models.all_families import build, spread

# Families whose files have heads, by the names of their text models.
FAMILIES = (
    "deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "ernie4_5_moe", "mimo",
)  # fmt: skip

# As on the hub: of a family that transformers does not have, whose model holds its head and does not run it.
CODE = """
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2MLP, Qwen2RMSNorm

class MiMoConfig(Qwen2Config):
    model_type = "mimo"

class MiMoMTPLayers(nn.Module):
    def __init__(self, config):
        super().__init__()
        size = config.hidden_size
        for name in ("input", "post_attention", "token", "hidden", "final"):
            self.add_module(f"{name}_layernorm", Qwen2RMSNorm(size))
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.self_attn, self.mlp = Qwen2Attention(config, 0), Qwen2MLP(config)

class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.mtp_layers = nn.ModuleList([MiMoMTPLayers(config)])
"""


class MiMoConfig(Qwen2Config):
    """As its code on the hub has it."""

    model_type = "mimo"


def mtp_target(family: str, vocab_size: int, **changes: Any) -> PreTrainedModel:
    if family != "mimo":
        return with_norms(build(family, seed=3, vocab_size=vocab_size, **changes))
    model = build("qwen2", seed=3, vocab_size=vocab_size, **changes)
    config = MiMoConfig(
        **{name: value for name, value in model.config.to_dict().items() if name != "model_type"}
    )
    config._attn_implementation = "eager"
    renamed = Qwen2ForCausalLM(config).float().eval()
    renamed.load_state_dict(model.state_dict())
    return with_norms(renamed)


@torch.no_grad()
def with_norms(model: PreTrainedModel) -> PreTrainedModel:
    """No two alike, also where a weight says what is added to one."""
    generator = torch.Generator().manual_seed(8)
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and "norm" in name:
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return model


@torch.no_grad()
def mtp_head(target: PreTrainedModel) -> PreTrainedModel:
    """A random head, with the target's embedding and output head."""
    torch.manual_seed(5)
    head = MTP.build(mtp_config(target.config), attn_implementation="eager").float().eval()
    spread(head, 5)
    with_norms(head)
    head.get_input_embeddings().weight.copy_(target.get_input_embeddings().weight)
    head.get_output_embeddings().load_state_dict(target.get_output_embeddings().state_dict())
    return head


class MtpHarness(EagleHarness):
    """An engine whose draft is a head of the target; ``blocks``: all that was drafted."""

    def runner_of(self, draft: PreTrainedModel) -> DrafterRunner:
        model = copy.deepcopy(draft).to(self.device)
        use_paged_attention(model)
        return DrafterRunner(model, self.device, MTP)


@torch.inference_mode()
def expected_probabilities(
    target: PreTrainedModel, head: PreTrainedModel, block: Drafted, temperature: float = 1.0
) -> list[float]:
    """Of a block's candidates: every one from a pass over the whole text, without a cache. The layer is the
    family's own in transformers, with its own attention; what is around it stands here as in the papers. The
    target has run all committed tokens but the last."""
    committed = torch.tensor(block.committed)
    states = list(target.get_decoder()(committed[None, :-1]).last_hidden_state[0])
    tokens = block.committed[1:]
    weights, probabilities = dict(head.named_parameters()), []
    for candidate in block.candidates:
        embedded = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        parts = [head.mtp.enorm(embedded), head.mtp.hnorm(torch.stack(states))]
        if target.config.model_type == "mimo":
            parts.reverse()
        joined = torch.cat(parts, dim=-1) @ weights["mtp.eh_proj.weight"].T
        output = head.model.norm(_layer(head, joined))[-1]
        own = (head.get_output_embeddings()(output) / temperature).softmax(dim=-1)
        probabilities.append(float(own[candidate]))
        states.append(output)
        tokens = [*tokens, candidate]
    return probabilities


def _layer(head: PreTrainedModel, joined_TE: Tensor) -> Tensor:
    """[T, E]."""
    num_tokens = len(joined_TE)
    positions = torch.arange(num_tokens)[None]
    mask = torch.full((num_tokens, num_tokens), -torch.inf).triu(1)[None, None]
    output = head.model.layers[0](
        joined_TE[None],
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=head.model.rotary_emb(joined_TE[None], position_ids=positions),
    )
    return (output[0] if isinstance(output, tuple) else output)[0]


# What published files call the parts of a head, before what follows.
_DEEPSEEK = {
    "mtp.": "model.layers.{num_layers}.",
    "model.norm.": "model.layers.{num_layers}.shared_head.norm.",
    "model.layers.0.": "model.layers.{num_layers}.",
}
_QWEN = {
    "mtp.enorm.": "mtp.pre_fc_norm_embedding.",
    "mtp.hnorm.": "mtp.pre_fc_norm_hidden.",
    "mtp.eh_proj.": "mtp.fc.",
    "model.norm.": "mtp.norm.",
    "model.layers.0.": "mtp.layers.0.",
}
PUBLISHED = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
    "mimo": {
        "mtp.enorm.": "model.mtp_layers.0.token_layernorm.",
        "mtp.hnorm.": "model.mtp_layers.0.hidden_layernorm.",
        "mtp.eh_proj.": "model.mtp_layers.0.input_proj.",
        "model.norm.": "model.mtp_layers.0.final_layernorm.",
        "model.layers.0.": "model.mtp_layers.0.",
    },
    "ernie4_5_moe": {
        "mtp.enorm.": "model.mtp_emb_norm.0.",
        "mtp.hnorm.": "model.mtp_hidden_norm.0.",
        "mtp.eh_proj.": "model.mtp_linear_proj.0.",
        "model.layers.0.": "model.mtp_block.0.",
    },
}


def save_head(head: PreTrainedModel, family: str, num_layers: int, folder: Path) -> None:
    """Into the model's file, under the names that published files have."""
    head.save_pretrained(folder / "head")
    stored = load_file(folder / "head" / "model.safetensors")
    shutil.rmtree(folder / "head")
    renamed = {}
    for name, weight in stored.items():
        for own, published in PUBLISHED[family].items():
            if name.startswith(own):
                renamed[published.format(num_layers=num_layers) + name.removeprefix(own)] = weight
                break
    if family == "deepseek_v3":  # has copies, which are not read
        for name in ("shared_head.head", "embed_tokens"):
            renamed[f"model.layers.{num_layers}.{name}.weight"] = torch.zeros(2, 2)
    own = load_file(folder / "model.safetensors")
    save_file(own | renamed, folder / "model.safetensors", metadata={"format": "pt"})


def write_code(folder: Path) -> None:
    (folder / "modeling_mimo.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "modeling_mimo.MiMoConfig", "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": code}))
