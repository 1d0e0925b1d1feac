"""Multi-token prediction heads that checkpoints hold beside their model (DeepSeek-V3, arXiv 2412.19437).

A module is one more layer of the model's own family. It reads, through ``eh_proj``, the embedding of a token
beside what the output head read of the token before, each with a norm of its own; what its own output head
reads stands for that state until the target has run the token. Embedding and head are the model's. So a
module is built as a model of one layer, whose embeddings are joined with states. Of several modules the first
is applied again and again, as it is where files hold one, and as in vLLM: the caches of the others would need
passes of theirs over all contexts. Published checkpoints of these families name one.

T flat tokens, E hidden size.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from specdist.models.draft_models.declaration import Drafter, ReadStates

ARCHITECTURE = "MultiTokenPrediction"
PROJECTION, LAYER = "mtp.eh_proj", "model.layers.0."
OWN_TO_A_FAMILY = ("model_type", "auto_map")
SHARED = re.compile(r"^(?:model\.(?:language_model\.)?(embed_tokens\.)|(lm_head\.))")
_DEEPSEEK = (
    ("model.layers.{}.enorm.", "mtp.enorm."),
    ("model.layers.{}.hnorm.", "mtp.hnorm."),
    ("model.layers.{}.eh_proj.", "mtp.eh_proj."),
    ("model.layers.{}.shared_head.norm.", "model.norm."),
    # Copies of the model's own.
    ("model.layers.{}.shared_head.", ""),
    ("model.layers.{}.embed_tokens.", ""),
    ("model.layers.{}.", LAYER),
)
_QWEN = (
    ("mtp.pre_fc_norm_embedding.", "mtp.enorm."),
    ("mtp.pre_fc_norm_hidden.", "mtp.hnorm."),
    ("mtp.fc.", "mtp.eh_proj."),
    ("mtp.norm.", "model.norm."),
    ("mtp.layers.0.", LAYER),
)


class Form(NamedTuple):
    """The form of a family's modules.

    Attributes:
        states_first: before the embeddings, where both are joined.
        family: of transformers, whose layers they have, where their own is not one of those.
        parts: what files call a part of the first module, with the number of the model's layers, and what it
            is called in the model of one layer; "" for what is not read.
        changes: to the family's configuration, for a layer with the number 0.
        has_norm: before its output head.
    """

    parts: tuple[tuple[str, str], ...]
    changes: dict[str, Any]
    has_norm: bool = True
    states_first: bool = False
    family: str | None = None


FORMS = {
    "deepseek_v3": Form(_DEEPSEEK, {"first_k_dense_replace": 0}),
    "glm4_moe": Form(_DEEPSEEK, {"first_k_dense_replace": 0}),
    "qwen3_next": Form(_QWEN, {"mlp_only_layers": [], "decoder_sparse_step": 1}),
    "qwen3_5_text": Form(_QWEN, {}),
    "qwen3_5_moe_text": Form(_QWEN, {}),
    "mimo": Form(
        (
            ("model.mtp_layers.0.token_layernorm.", "mtp.enorm."),
            ("model.mtp_layers.0.hidden_layernorm.", "mtp.hnorm."),
            ("model.mtp_layers.0.input_proj.", "mtp.eh_proj."),
            ("model.mtp_layers.0.final_layernorm.", "model.norm."),
            ("model.mtp_layers.0.", LAYER),
        ),
        {},
        states_first=True,
        family="qwen2",
    ),
    "ernie4_5_moe": Form(
        (
            ("model.mtp_emb_norm.0.", "mtp.enorm."),
            ("model.mtp_hidden_norm.0.", "mtp.hnorm."),
            ("model.mtp_linear_proj.0.", "mtp.eh_proj."),
            ("model.mtp_block.0.", LAYER),
        ),
        # Its layer has no experts.
        {"moe_layer_start_index": 1},
        has_norm=False,
    ),
}


def mtp_config(config: Any) -> Any:
    """The configuration of the first module of a model with this one, whose family has a :class:`Form`."""
    text = copy.deepcopy(config.get_text_config())
    family, form = text.model_type, FORMS[text.model_type]
    if form.family is not None:
        values = {name: value for name, value in text.to_dict().items() if name not in OWN_TO_A_FAMILY}
        text = CONFIG_MAPPING[form.family](**values)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        text.quantization_config = quantization
    text.dtype = config.dtype or text.dtype
    text.architectures, text.mtp_family = [ARCHITECTURE], family
    text.mtp_layer, text.num_hidden_layers = text.num_hidden_layers, 1
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = ["full_attention"]
    for name, value in form.changes.items():
        setattr(text, name, value)
    return text


class FileNames:
    """What a module's parts are called in the files of its model."""

    def __init__(self, config: Any) -> None:
        parts = FORMS[config.mtp_family].parts
        self._parts = [(stored.format(config.mtp_layer), own) for stored, own in parts]

    def is_of_module(self, stored: str) -> bool:
        return any(own and stored.startswith(prefix) for prefix, own in self._parts)

    def num_modules(self, stored_names: Iterable[str]) -> int:
        """Whose layers are in the files."""
        first = next(prefix for prefix, own in self._parts if own == LAYER).removesuffix(".")
        stack, _, number = first.rpartition(".")
        matches = map(re.compile(rf"{re.escape(stack)}\.(\d+)\.").match, stored_names)
        return sum(int(found) >= int(number) for found in {match[1] for match in matches if match})

    def own(self, stored: str) -> str | None:
        """The name in the model of one layer; None for what it does not read."""
        for prefix, own in self._parts:
            if stored.startswith(prefix):
                return own + stored.removeprefix(prefix) if own else None
        shared = SHARED.match(stored)
        if shared is None:
            return None
        return f"model.{stored[shared.start(1) :]}" if shared[1] else stored

    def has_scales(self, stored_names: Iterable[str]) -> bool:
        """Whether there are parts of the projection beside its weight: then it is quantised."""
        own = [self.own(name) or "" for name in stored_names]
        return any(name.startswith(f"{PROJECTION}.") and name != f"{PROJECTION}.weight" for name in own)

    def stored(self, own: str) -> str:
        """The other way."""
        found = [
            prefix + own.removeprefix(name) for prefix, name in self._parts if name and own.startswith(name)
        ]
        return found[0] if found else own


class JoinedStates(nn.Module):
    """Gives a layer the embeddings [1, T, E] of tokens joined with the states before them."""

    def __init__(self, norm: type[nn.Module], config: Any) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = norm(size, eps=eps), norm(size, eps=eps)
        projection = nn.Linear if getattr(config, "mtp_projection_is_quantized", False) else _Projection
        self.eh_proj = projection(2 * size, size, bias=False)
        self._states_first = FORMS[config.mtp_family].states_first

    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        parts = [self.enorm(embedded), self.hnorm(states)]
        joined: Tensor = self.eh_proj(torch.cat(parts[::-1] if self._states_first else parts, dim=-1))
        return joined


class _Projection(nn.Linear):
    """Plain also where a checkpoint's linear layers are quantised."""


@contextmanager
def joining(model: PreTrainedModel, states_TE: Tensor) -> Iterator[None]:
    """While a pass of the model runs, its tokens' embeddings are joined with these states."""

    def join(module: nn.Module, inputs: tuple[Any, ...], embedded: Tensor) -> Tensor:
        del module, inputs
        joined: Tensor = model.mtp(embedded, states_TE[None])
        return joined

    hook = model.get_input_embeddings().register_forward_hook(join)
    try:
        yield
    finally:
        hook.remove()


class MultiTokenPrediction(Drafter):
    """Drafts token by token from what the target's output head reads."""

    what = "the target's own MTP head"
    shares_vocabulary = True

    def fits(self, config: Any) -> bool:
        return (getattr(config, "architectures", None) or [None])[0] == ARCHITECTURE

    def build(self, config: Any, **options: Any) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
        norm = model.model.norm
        dtype = next(model.parameters()).dtype
        model.mtp = JoinedStates(type(norm), config).to(dtype)
        if not FORMS[config.mtp_family].has_norm:
            model.model.norm = nn.Identity()
        model.file_names = FileNames(config)
        return model

    def read_states(self, config: Any, num_target_layers: int) -> ReadStates:
        del config, num_target_layers
        return ReadStates(has_final=True)

    def num_read_numbers(self, config: Any) -> int:
        return int(config.hidden_size)

    def num_kept_numbers(self, config: Any) -> int:
        return int(config.hidden_size)


MTP = MultiTokenPrediction()
