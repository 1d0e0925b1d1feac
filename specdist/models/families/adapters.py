"""Attention over pages for any model: through transformers' registry, or through an adapter of its own.

GPT-Neo calls its attention directly, without the registry, and would give wrong results without an error. Its
local layers attend to a window of the last tokens, like the sliding windows of other families.

T flat tokens, H heads, D head width, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoAttention, GPTNeoSelfAttention

from specdist.models.attention.attention import (
    ATTENTION_NAME,
    AttentionCall,
    AttentionRules,
    is_running,
    running_attention,
)
from specdist.models.attention.latent import use_latents
from specdist.models.recurrent.kinds import mixer_of
from specdist.models.recurrent.mixers import Mixer

# Stands for a layer's number.
SHARED = -1
# The attribute of a recurrent module with its mixer.
MIXER = "mixer_of_states"


def can_page_attention(model_class: type[PreTrainedModel], family: str) -> bool:
    """Whether models of this class and family can run over pages."""
    return model_class._can_set_attn_implementation() or family in ADAPTERS


def use_paged_attention(model: PreTrainedModel) -> None:
    """Switch the model to attention over pages: that of
    :func:`specdist.models.attention.attention.attending`."""
    use_attention(model, ATTENTION_NAME)


def is_paged_by_registry(model: nn.Module) -> bool:
    """Whether transformers calls the attention over pages, and not an adapter or a model of our own."""
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) in ADAPTERS:
        return False
    # A wrapper may have it in its text's configuration alone.
    configs = () if config is None else (config, config.get_text_config())
    return any(getattr(each, "_attn_implementation", None) == ATTENTION_NAME for each in configs)


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Select one of the registry's functions."""
    adapt = ADAPTERS.get(model.config.model_type)
    if adapt is None:
        model.set_attn_implementation(name)
        use_latents(model)
        _use_mixers(model)
        _number_shared_layers(model)
    else:
        adapt(model)
        # As for families of the registry, this name selects the attention, and no mask is built for it.
        model.config._attn_implementation = name


def _use_mixers(model: nn.Module) -> None:
    """Let recurrent modules run over states in passes, and as they are outside of them."""
    for module in model.modules():
        if MIXER not in vars(module) and (mixer := mixer_of(module)) is not None:
            setattr(module, MIXER, mixer)
            module.forward = partial(_mixed, mixer, module)


def _mixed(mixer: Mixer, module: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """[1, T, E] to the same, as a module's own forward; of a pass there are no masks, and no cache."""
    if not is_running():
        return type(module).forward(module, hidden_states, *args, **kwargs)
    rows_TR, rest = mixer.project(hidden_states[0])
    mixing: Any = running_attention()
    return mixer.output(mixing.mix(mixer, rows_TR), rest)[None]


def _number_shared_layers(model: nn.Module) -> None:
    """Let attention that several layers share know in which one it is: Zamba tells it with each call."""
    for module in model.modules():
        if getattr(module, "layer_idx", None) == SHARED and not module._forward_pre_hooks:
            module.register_forward_pre_hook(_take_number, with_kwargs=True)


def _take_number(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    module.layer_idx = kwargs["layer_idx"]


class PagedGPTNeoAttention(nn.Module):
    """A layer's attention module with its own projections, and attention over pages between them."""

    def __init__(self, original: GPTNeoSelfAttention) -> None:
        super().__init__()
        self.original = original
        window = original.config.window_size if original.attention_type == "local" else None
        # The scores are not divided by sqrt(D). Half precision sums them in float32, as transformers does.
        self._rules = AttentionRules(scale=1.0, window=window, softcap=None)

    def forward(
        self, hidden_states: Tensor, layer_past: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [1, T, E] → the same shape."""
        layer = self.original
        if layer.config._attn_implementation != ATTENTION_NAME:
            output: tuple[Tensor, Tensor] = layer(hidden_states, layer_past=layer_past, **kwargs)
            return output
        queries_THD, keys_THD, values_THD = (
            projection(hidden_states[0]).unflatten(-1, (layer.num_heads, layer.head_dim))
            for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        call = AttentionCall(queries_THD, keys_THD, values_THD, self._rules)
        output_THD = running_attention().attend(layer.layer_id, call)
        return layer.out_proj(output_THD.flatten(1))[None], None


def _adapt_gpt_neo(model: PreTrainedModel) -> None:
    for module in list(model.modules()):
        if isinstance(module, GPTNeoAttention):
            if isinstance(module.attention, PagedGPTNeoAttention):
                return
            module.attention = PagedGPTNeoAttention(module.attention)


ADAPTERS: dict[str, Callable[[PreTrainedModel], None]] = {"gpt_neo": _adapt_gpt_neo}
