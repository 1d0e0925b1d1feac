"""An EAGLE-3 draft in training (Li et al. 2025, arXiv 2503.01840, section 3.2: training-time test).

The draft learns to go on from its own states: step 1 reads the target's states, every further step the output
of the step before it, as in a block that it drafts. A token of step s sees, as in that block, what lies s
positions back or further as step 1 has read it, and its s - 1 nearest as steps 2 to s have.

B sequences, L tokens of the longest, M positions before tokens of completions, E hidden size, S numbers of
the target's three states, H heads, G key/value heads, D head width, v vocabulary of the draft.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from specdist.distillation.acceptance import acceptances
from specdist.distillation.config import DistillConfig
from specdist.distillation.data import Batch, Example
from specdist.distillation.losses import distribution_loss, token_loss
from specdist.distillation.model_draft import load_teacher
from specdist.job.model_plan import ModelPlan
from specdist.models.checkpoint import Checkpoint
from specdist.models.eagle import NUM_STATES, LlamaForCausalLMEagle3, state_layers
from specdist.models.eagle_loading import load_eagle
from specdist.models.states import decoder_layers
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.errors import UserError

# Of the loss of each further step: the first tokens of a block count most.
STEP_WEIGHT = 0.8
# As the published drafts have.
USUAL_VOCABULARY = 32_000


class EagleStudent:
    """A :class:`specdist.distillation.students.Student`."""

    def __init__(
        self,
        config: DistillConfig,
        models: ModelPlan,
        examples: Sequence[Example],
        settings: SamplingSettings,
        device: torch.device,
    ) -> None:
        """``examples``: whose most frequent tokens a new draft knows."""
        self._config, self._settings, self._vocab_size = config, settings, models.vocab_size
        self._target = load_teacher(models.target, config.dtype, device)
        self._dtype = models.target.torch_dtype(config.dtype)
        if models.draft is not None and models.draft.is_eagle:
            model = load_eagle(models.draft, models.target, dtype=torch.float32, device=device)
        else:
            model = new_draft(config, models.target, self._target, examples).to(device)
        model.embed_tokens.requires_grad_(False)
        self._model = model.train()
        num_layers = models.target.config.get_text_config().num_hidden_layers
        self._layers = state_layers(model.config, num_layers)

    @property
    def module(self) -> nn.Module:
        return self._model

    @property
    def hidden_size(self) -> int:
        return int(self._model.config.hidden_size)

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self._model.parameters())

    def loss(self, batch: Batch) -> Tensor:
        """Over all steps, each counting less than the one before it, as if they were one."""
        states_BLS, target_MV = self._target_pass(batch)
        known_v = self._model.known_ids
        weights = [STEP_WEIGHT**step for step in range(self._config.unrolled_steps)]
        total = torch.zeros((), device=states_BLS.device)
        for step, outputs_BLE in enumerate(
            unrolled(self._model, batch.token_ids_BL, states_BLS, self._config.unrolled_steps)
        ):
            usable_M = batch.columns_M > step
            own_Mv = self._model.own_logits(batch.at_places(outputs_BLE))[usable_M]
            if self._config.resolved_teacher == "tokens":
                token_ids_M = batch.places.token_ids_M[usable_M]
                is_known_M = self._model.t2d[token_ids_M]
                found = token_loss(own_Mv[is_known_M], torch.searchsorted(known_v, token_ids_M[is_known_M]))
            else:
                logs_Mv = target_MV[usable_M][:, known_v].log_softmax(-1)
                found = distribution_loss(self._config.resolved_loss, own_Mv, logs_Mv)
            total = total + weights[step] / sum(weights) * found
        return total

    @torch.no_grad()
    def acceptances(self, batch: Batch) -> Sequence[np.ndarray]:
        """The mean over the steps: over the places of a block."""
        states_BLS, target_MV = self._target_pass(batch)
        found = []
        for step, outputs_BLE in enumerate(
            unrolled(self._model, batch.token_ids_BL, states_BLS, self._config.unrolled_steps)
        ):
            logits_MV = self._model.logits(batch.at_places(outputs_BLE))[:, : self._vocab_size]
            accepted_M = acceptances(logits_MV, batch.places, self._settings, target_MV)
            found.append(accepted_M.masked_fill(batch.columns_M <= step, 0))
        mean_M = torch.stack(found).mean(dim=0)
        return np.split(mean_M.cpu().numpy(), np.cumsum(batch.lengths)[:-1])

    def save(self, folder: Path) -> None:
        model = copy.deepcopy(self._model).to(device="cpu", dtype=self._dtype)
        model.config.dtype = self._dtype
        model.save_pretrained(folder)

    @torch.no_grad()
    def _target_pass(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """States [B, L, S] in float32, and logits [M, V] before the completions' tokens."""
        found: list[Tensor] = []
        layers = decoder_layers(self._target)
        hooks = [
            layers[layer].register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].clone()))
            for layer in self._layers
        ]
        try:
            logits_BLV = self._target(batch.token_ids_BL, use_cache=False).logits
        finally:
            for hook in hooks:
                hook.remove()
        target_MV = batch.at_places(logits_BLV)[:, : self._vocab_size].float()
        return torch.cat(found, dim=-1).float(), target_MV


def unrolled(
    model: LlamaForCausalLMEagle3, token_ids_BL: Tensor, states_BLS: Tensor, num_steps: int
) -> Iterator[Tensor]:
    """Output states [B, L, E] of every step, from the target's. Those of the first positions, one more in
    each step, are of tokens without a state before them."""
    layer, num_tokens = model.midlayer, token_ids_BL.shape[1]
    embedded_BLE = model.embed_tokens(token_ids_BL)
    rotation = model.rotation((torch.arange(num_tokens, device=token_ids_BL.device) - 1).clamp(min=0))
    states_BLE = model.fc(states_BLS)
    of_steps: list[tuple[Tensor, Tensor]] = []
    for _ in range(num_steps):
        # The state before a token is at its position.
        states_BLE = states_BLE.roll(1, dims=1)
        inputs = layer.inputs(embedded_BLE, states_BLE)
        of_steps.append(layer.self_attn.keys_and_values(inputs, rotation))
        attended = _attend(layer.self_attn.queries(inputs, rotation), of_steps)
        states_BLE = layer.outputs(states_BLE, attended)
        yield states_BLE


def _attend(queries_BLHD: Tensor, of_steps: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """[B, L, H, D]: of the last of these steps, each with its keys and values [B, L, G, D]."""
    num_tokens, num_heads, width = queries_BLHD.shape[1:]
    repeats = num_heads // of_steps[0][0].shape[2]
    wide = [[each.repeat_interleave(repeats, dim=2) for each in pair] for pair in of_steps]
    last = len(of_steps) - 1
    scores_BHLL = torch.einsum("blhd,bkhd->bhlk", queries_BLHD, wide[0][0]) * width**-0.5
    places = torch.arange(num_tokens, device=queries_BLHD.device)
    # Position 0 is seen by none but itself, whose output is of no use.
    is_seen_LL = (places[None] <= places[:, None] - last) & (places[None] > 0)
    is_seen_LL[:, 0] |= places <= last
    scores_BHLL = scores_BHLL.masked_fill(~is_seen_LL, -torch.inf)
    # Of step k, the token that lies last - k positions back.
    near = [
        (
            (queries_BLHD * keys.roll(last - step, dims=1)).sum(-1).transpose(1, 2) * width**-0.5,
            values.roll(last - step, dims=1),
        )
        for step, (keys, values) in enumerate(wide)
        if step
    ]
    scores = torch.cat([scores_BHLL, *(found[..., None] for found, _ in near)], dim=-1)
    shares = scores.softmax(dim=-1)
    attended = torch.einsum("bhlk,bkhd->blhd", shares[..., :num_tokens], wide[0][1])
    for index, (_, values) in enumerate(near):
        attended = attended + shares[..., num_tokens + index].transpose(1, 2)[..., None] * values
    return attended


def new_draft(
    config: DistillConfig, target: Checkpoint, model: PreTrainedModel, examples: Sequence[Example]
) -> LlamaForCausalLMEagle3:
    """A draft of the target's own width, which begins with the target's output head."""
    text = target.config.get_text_config()
    num_ids = config.draft_vocab_size or min(USUAL_VOCABULARY, text.vocab_size)
    num_heads = text.num_attention_heads
    own = LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // num_heads,
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": _rope_theta(text)},
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        tie_word_embeddings=False,
        draft_vocab_size=min(num_ids, text.vocab_size),
    )
    own.eagle_aux_hidden_state_layer_ids = new_state_layers(target)
    torch.manual_seed(config.seed)
    draft = LlamaForCausalLMEagle3(own).float()
    draft.know(frequent_ids(examples, own.draft_vocab_size, text.vocab_size))
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(model.get_input_embeddings().weight)
        draft.lm_head.weight.copy_(model.get_output_embeddings().weight[draft.known_ids])
        # The state that enters the last third of the target is closest to its output.
        draft.fc.weight.zero_()
        draft.fc.weight[:, (NUM_STATES - 1) * text.hidden_size :] = torch.eye(text.hidden_size)
    return draft


def new_state_layers(target: Checkpoint) -> list[int]:
    """Before which of the target's layers a new draft reads its states: the published ones, or the last three
    of a target with few.

    Raises :class:`UserError` for a target with fewer than three.
    """
    num_layers = target.config.get_text_config().num_hidden_layers
    if num_layers < NUM_STATES:
        raise UserError(
            f"--kind eagle3 with --target {target.name}: such a draft reads the states of three layers, and "
            f"this target has {num_layers}: use --kind model"
        )
    try:
        return list(state_layers(None, num_layers))
    except ValueError:
        return list(range(num_layers - NUM_STATES, num_layers))


def frequent_ids(examples: Sequence[Example], num_ids: int, vocab_size: int) -> Tensor:
    """int64 [v]: the most frequent tokens of the completions, then the first others; ascending."""
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(example.completion_ids.tolist())
    frequent = [token_id for token_id, _ in counts.most_common(num_ids) if token_id < vocab_size]
    others = (token_id for token_id in range(vocab_size) if token_id not in counts)
    while len(frequent) < num_ids:
        frequent.append(next(others))
    return torch.tensor(sorted(frequent))


def _rope_theta(text: LlamaConfig) -> float:
    parameters = getattr(text, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta", 10_000.0))
