"""EAGLE-3 drafts (Li et al. 2025, arXiv 2503.01840): a layer or several that draft from the target's states.

Hidden states of three of the target's layers, fused by ``fc`` into one, say what the target knows after a
token. The first layer reads them beside the embedding of the token that follows; what the last one puts out
stands for the fused state of that token, until the target has run it. Checkpoints have the names and shapes
of the published ones (``LlamaForCausalLMEagle3``, or in speculators' format); embeddings that they lack are
the target's. Options of theirs: ``norm_before_residual`` (also of EAGLE-3's own states), ``norm_before_fc``
(over all states), ``fc_norm`` (over each), ``norm_output`` (the states that are handed on, too).

T tokens, N tokens whose logits are wanted, E hidden size, S numbers of the states side by side, H heads, G
key/value heads, D head width, V vocabulary of the target, v that of the draft.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from specdist.models.draft_models.declaration import OwnFilesDrafter, ReadStates
from specdist.models.draft_models.layers import MLPS, Attend, DrafterLayer, OwnVocabularyModel, Rotation

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "PEagleDraftModel")
NUM_STATES = 3
STATE_LAYERS, MASK_TOKEN, NUM_TOKENS = (
    "eagle_aux_hidden_state_layer_ids",
    "mask_token_id",
    "speculative_tokens",
)
# In speculators' format.
OPTIONS = (
    STATE_LAYERS, MASK_TOKEN, "draft_vocab_size", "embed_requires_grad", "fc_norm", "norm_before_fc",
    "norm_before_residual", "norm_output", "target_hidden_size",
)  # fmt: skip
# What configurations of P-EAGLE drafts call the id of a token that is not known yet.
MASK_TOKENS = (MASK_TOKEN, "pard_token", "ptd_token_id")
# Where they do not say for how many tokens they were trained: as the paper's are.
TRAINED_TOKENS = 8


class LlamaForCausalLMEagle3(OwnVocabularyModel):
    """The draft, under the name that published configurations have."""

    config_class = LlamaConfig
    config: LlamaConfig
    # They are the target's.
    _keys_to_ignore_on_save = ["embed_tokens.weight"]  # noqa: RUF012 (transformers' own interface)

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        vocab_size, eps = config.vocab_size, config.rms_norm_eps
        num_own = getattr(config, "draft_vocab_size", None) or vocab_size
        self.embed_tokens = nn.Embedding(vocab_size, config.hidden_size)
        num_read = EAGLE3.num_read_numbers(config)
        self.fc = nn.Linear(num_read, config.hidden_size, bias=bool(getattr(config, "bias", 0)))
        self.midlayer = DrafterLayer(config, 0, reads_embeddings=True)
        later = {str(layer): DrafterLayer(config, layer) for layer in range(1, config.num_hidden_layers)}
        self.layers = nn.ModuleDict(later)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=eps)
        self.lm_head = nn.Linear(config.hidden_size, num_own, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        if getattr(config, "norm_before_fc", False):
            self.input_norm = LlamaRMSNorm(num_read, eps=eps)
        if getattr(config, "fc_norm", False):
            size = EAGLE3.state_size(config)
            norms = [LlamaRMSNorm(size, eps=eps) for _ in range(num_read // size)]
            self.fc_norm = nn.ModuleList(norms)
        if PEAGLE.fits(config):
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, num_read))
        self.register_vocabulary(num_own)
        self.post_init()

    def fused(self, states_TS: Tensor) -> Tensor:
        """[T, E]: of the target's states."""
        if hasattr(self, "input_norm"):
            states_TS = self.input_norm(states_TS)
        if hasattr(self, "fc_norm"):
            parts = states_TS.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            states_TS = torch.cat(normed, dim=-1)
        fused: Tensor = self.fc(states_TS)
        return fused

    def rotation(self, positions_T: Tensor) -> Rotation:
        """The first pair of a token and a state before it is at position 0."""
        return Rotation.at(positions_T, self.rotary_emb, self.fc.weight)

    def draft(
        self, token_ids_T: Tensor, states_TE: Tensor, rotation: Rotation, index_N: Tensor, attend: Attend
    ) -> Tensor:
        """[N, E]: the output states of the tokens at ``index_N``, of tokens and the states before them."""
        first, hidden = self.midlayer, states_TE
        normed = first.hidden_norm(states_TE)
        if getattr(self.config, "norm_before_residual", False):
            hidden = normed
        inputs = torch.cat([first.input_layernorm(self.embed_tokens(token_ids_T)), normed], dim=-1)
        stack: list[Any] = [first, *self.layers.values()]
        for layer in stack:
            inputs = inputs if layer is first else layer.input_layernorm(hidden)
            hidden = layer(hidden, inputs, rotation, attend, index_N if layer is stack[-1] else None)
        return self.norm(hidden) if self._hands_on_normed else hidden

    @property
    def _hands_on_normed(self) -> bool:
        return bool(getattr(self.config, "norm_output", False))

    def logits(self, outputs_NE: Tensor) -> Tensor:
        """[N, V]: over the target's vocabulary, from output states."""
        return self.whole_logits(self.own_logits(outputs_NE))

    def after(self, own_Nv: Tensor, hidden_NE: Tensor, token_ids_N: Tensor) -> Tensor:
        """[N, V]: the same, of :meth:`own_logits`; whatever is drawn."""
        del hidden_NE, token_ids_N
        return self.whole_logits(own_Nv)

    def own_logits(self, outputs_NE: Tensor) -> Tensor:
        """[N, v]."""
        found: Tensor = self.lm_head(outputs_NE if self._hands_on_normed else self.norm(outputs_NE))
        return found


class Eagle3(OwnFilesDrafter):
    """Drafts token by token from three of the target's states."""

    what = "an EAGLE-3 draft"
    # The target's, for training.
    unused_names = ("verifier_norm.", "verifier_lm_head.")
    renamed = (("layers.0.", "midlayer."),)

    def fits(self, config: Any) -> bool:
        names = getattr(config, "architectures", None) or ()
        return any(name in ARCHITECTURES for name in names)

    def build(self, config: Any, **options: Any) -> PreTrainedModel:
        del options
        return LlamaForCausalLMEagle3(config)

    def faults(self, config: Any, target_config: Any) -> list[str]:
        found = super().faults(config, target_config)
        if config.model_type not in MLPS:
            found.append(f"layers of {config.model_type}, and those of {' and '.join(MLPS)} are read here")
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            found.append("layers with a sliding window, which are not read here")
        return found

    def read_states(self, config: Any, num_target_layers: int) -> ReadStates:
        own = getattr(config, "eagle_config", None) or {}
        named = own.get(STATE_LAYERS) if isinstance(own, dict) else None
        given = named or getattr(config, STATE_LAYERS, None)
        layers = tuple(sorted(given or (2, num_target_layers // 2, num_target_layers - 3)))
        if len(set(layers)) != NUM_STATES or not all(
            type(layer) is int and 0 <= layer < num_target_layers for layer in layers
        ):
            shown = ", ".join(map(str, layers))
            raise ValueError(
                f"the draft reads the states before layers {shown} ({STATE_LAYERS}), and not three of the "
                f"target's {num_target_layers}"
            )
        return ReadStates(layers)

    def num_read_numbers(self, config: Any) -> int:
        return NUM_STATES * self.state_size(config)

    def num_kept_numbers(self, config: Any) -> int:
        return int(config.hidden_size)


EAGLE3 = Eagle3()


class ParallelEagle(Eagle3):
    """P-EAGLE (arXiv 2602.01469): a block in one pass. Tokens that are not known yet have an id and a state
    of their own, and see what is before them."""

    what = "a P-EAGLE draft"
    drafts_blocks = True

    def fits(self, config: Any) -> bool:
        return super().fits(config) and self._mask_token(config) is not None

    def build(self, config: Any, **options: Any) -> PreTrainedModel:
        config.block_size, config.first_row = self.max_draft_tokens(config), 0
        config.mask_token_id = self._mask_token(config)
        return super().build(config, **options)

    def faults(self, config: Any, target_config: Any) -> list[str]:
        found = super().faults(config, target_config)
        if self.max_draft_tokens(config) < 2:
            found.append(f"{NUM_TOKENS} {self.max_draft_tokens(config)}, which is not a block")
        return found

    def max_draft_tokens(self, config: Any) -> int:
        return int(getattr(config, NUM_TOKENS, None) or TRAINED_TOKENS)

    def _mask_token(self, config: Any) -> int | None:
        found = [getattr(config, name, None) for name in MASK_TOKENS]
        return next((int(each) for each in found if each is not None), None)


PEAGLE = ParallelEagle()
