"""transformers' ``Trainer`` for a draft: its losses, texts of its own to learn from, and its acceptance.

The texts are the on-policy data of DistillSpec (Zhou et al. 2023, arXiv:2310.08461) and GKD (Agarwal et al.
2023, arXiv:2306.13649): the target's distribution after every token takes one pass, whoever has written it.

M learned tokens, C columns before them, V vocabulary, K recorded tokens. ``known`` are a batch's arrays at
the learned tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import EarlyStoppingCallback, PreTrainedModel, Trainer, TrainingArguments

from specdist.config.generate import GenerateConfig
from specdist.sampling.distributions import Dense, SamplingSettings, distributions_from_logits
from specdist.training.drafts.config import USUAL_SEQUENCES, DistillConfig
from specdist.training.drafts.data import IGNORED, Examples, collate, padded

# The share of all steps between two evaluations, each with a checkpoint.
INTERVAL = 0.05
# The rate of fine-tuning a model of this width; one of another width gets a rate in inverse proportion.
USUAL_RATE, USUAL_WIDTH = 5e-5, 2048
# A smaller share of the tokens that are not recorded counts as this large.
LEAST_SHARE = 1e-9
# Of the draft's own texts. Greedy texts of a small model repeat themselves: it learns less from them.
MOST_TOKENS, LEAST_TEMPERATURE = 256, 0.5
Known = Mapping[str, Tensor]


class OneDevice(TrainingArguments):
    """A process has one device: several are used by as many ranks, never by ``DataParallel``."""

    @property
    def n_gpu(self) -> int:
        """Devices of this process."""
        return min(1, super().n_gpu)


class DraftTrainer(Trainer):
    """Trains the draft in place; at the end it has the weights with the highest acceptance."""

    def __init__(
        self,
        config: DistillConfig,
        run: GenerateConfig,
        examples: Examples,
        draft: PreTrainedModel,
        target: PreTrainedModel | None,
        *,
        vocab_size: int,
        folder: str,
    ) -> None:
        """``target``: if it is the teacher itself; ``vocab_size``: ids that both models know; ``folder``: for
        checkpoints."""
        is_cuda = config.device != "cpu" and torch.cuda.is_available()
        usual_rate = USUAL_RATE * USUAL_WIDTH / draft.config.get_text_config().hidden_size
        usual_epochs = min(20, max(2, round(USUAL_SEQUENCES / len(examples.learned))))
        arguments = OneDevice(
            output_dir=folder, use_cpu=not is_cuda, bf16=is_cuda and torch.cuda.is_bf16_supported(),
            num_train_epochs=config.epochs or usual_epochs,
            per_device_train_batch_size=config.batch_size, per_device_eval_batch_size=config.batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            learning_rate=config.learning_rate or usual_rate, lr_scheduler_type="cosine", warmup_steps=0.03,
            adam_beta2=0.95, weight_decay=0.01, seed=config.seed,
            eval_strategy="steps", eval_steps=INTERVAL, save_steps=INTERVAL, logging_steps=INTERVAL,
            save_total_limit=2, load_best_model_at_end=True, metric_for_best_model="acceptance",
            restore_callback_states_from_checkpoint=True, remove_unused_columns=False, report_to="none",
        )  # fmt: skip
        super().__init__(
            model=draft,
            args=arguments,
            train_dataset=examples.learned,
            eval_dataset=examples.held_out,
            data_collator=collate,
            compute_metrics=lambda found: {"acceptance": found.predictions[found.predictions >= 0].mean()},
            callbacks=[EarlyStoppingCallback(config.patience)],
        )
        # A loss is a mean over the tokens of a pass, and a step's the mean over its passes.
        self.model_accepts_loss_kwargs = False
        self._config, self._run, self._vocab_size = config, run, vocab_size
        self._target = None if target is None else target.to(arguments.device)
        self._settings = SamplingSettings(temperature=run.temperature, top_k=run.top_k, top_p=run.top_p)

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:
        """The loss in nats per token."""
        inputs = with_own_texts(
            inputs,
            self.model,
            temperature=self._run.temperature,
            vocab_size=self._vocab_size,
            num_tokens=self._run.max_new_tokens,
            seeds=[self._config.seed, self.state.global_step, self.args.process_index],
        )
        return loss_of(self._config, *self._at_labels(model, inputs))

    @torch.no_grad()
    def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> tuple[None, Tensor, Tensor]:
        """No loss, but every learned token's acceptance; labels must be returned for it to be counted."""
        inputs = self._prepare_inputs(inputs)
        found_M = acceptances(self._settings, *self._at_labels(model, inputs))
        found_BL = torch.full(inputs["labels"].shape, float(IGNORED), device=found_M.device)
        found_BL[inputs["labels"] != IGNORED] = found_M.float()
        return None, found_BL, inputs["labels"]

    def _at_labels(self, model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None, Known]:
        """Logits [M, V] of the draft, and of the target if it is the teacher, for the ids that both have; and
        what is known of the learned tokens. The output head runs at their columns alone."""
        rows_M, columns_M = (inputs["labels"][:, 1:] != IGNORED).nonzero(as_tuple=True)
        columns_C, places_M = columns_M.unique(return_inverse=True)

        def logits(of: Any) -> Tensor:
            found_BCV = of(inputs["input_ids"], use_cache=False, logits_to_keep=columns_C).logits
            found: Tensor = found_BCV[rows_M, places_M, : self._vocab_size].float()
            return found

        known = {name: found_BL[rows_M, columns_M + 1] for name, found_BL in inputs.items()}
        with torch.no_grad():
            target_MV = None if self._target is None else logits(self._target)
        return logits(model), target_MV, known


def with_own_texts(
    inputs: dict[str, Tensor],
    draft: PreTrainedModel,
    *,
    temperature: float,
    vocab_size: int,
    num_tokens: int,
    seeds: Sequence[int],
) -> dict[str, Tensor]:
    """A batch with what the draft writes after each prompt in it, up to the text's end or to a token that is
    not among the ``vocab_size`` ids of the target; the same for the same ``seeds``."""
    ids, labels = list(inputs["input_ids"]), list(inputs["labels"])
    rows = [row for row, labels_L in enumerate(labels) if int(labels_L[0]) != IGNORED]
    prompts = [labels[row][labels[row] != IGNORED] for row in rows]
    left_BL = padded(prompts, IGNORED, "left") if rows else inputs["input_ids"]
    longest = left_BL.shape[1]
    room = getattr(draft.config.get_text_config(), "max_position_embeddings", 2**31) - longest
    num_tokens = min(room, num_tokens, MOST_TOKENS)
    if not rows or num_tokens < 1:
        return inputs
    ends = draft.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    draft.eval()
    with torch.no_grad(), torch.random.fork_rng([left_BL.device] if left_BL.is_cuda else []):
        torch.manual_seed(int(np.random.default_rng(seeds).integers(2**31)))
        drawn_BN = draft.generate(
            left_BL.clamp_min(0), attention_mask=(left_BL != IGNORED).long(), max_new_tokens=num_tokens,
            do_sample=True, temperature=max(LEAST_TEMPERATURE, temperature), top_k=0, top_p=1.0,
            pad_token_id=min(ends, default=0),
        )[:, longest:]  # fmt: skip
    draft.train()
    is_end_BN = torch.isin(drawn_BN, torch.tensor(ends, dtype=torch.int64, device=drawn_BN.device)).long()
    is_over_BN = (is_end_BN.cumsum(1) - is_end_BN + (drawn_BN >= vocab_size).cumsum(1)) > 0
    for row, prompt, drawn_N, is_over_N in zip(rows, prompts, drawn_BN, is_over_BN, strict=True):
        ids[row] = labels[row] = torch.cat([prompt, drawn_N[~is_over_N]])
    return {"input_ids": padded(ids, 0), "labels": padded(labels, IGNORED)}


def loss_of(config: DistillConfig, logits_MV: Tensor, target_MV: Tensor | None, known: Known) -> Tensor:
    """The loss of draft logits against the target's; without these against the K recorded tokens, and all
    others as one token more; or the cross entropy of the target's tokens."""
    logs_MV = logits_MV.log_softmax(-1)
    if target_MV is not None:
        return divergence(logs_MV, target_MV.log_softmax(-1))
    if config.teacher == "tokens":
        return F.nll_loss(logs_MV, known["labels"])
    logs_MK = logs_MV.gather(1, known["top_logprob_ids"].long())
    return divergence(_with_rest(logs_MK), _with_rest(known["top_logprobs"].float()))


def _with_rest(logs_MK: Tensor) -> Tensor:
    """The log-probabilities and the logarithm of what is left of 1."""
    rest_M1 = (1 - logs_MK.exp().sum(1, keepdim=True)).clamp_min(LEAST_SHARE)
    return torch.cat([logs_MK, rest_M1.log()], 1)


def divergence(logs_MV: Tensor, target_logs_MV: Tensor) -> Tensor:
    """KL(target || draft), a mean over the tokens."""
    return F.kl_div(logs_MV, target_logs_MV, log_target=True, reduction="batchmean")


def acceptances(
    settings: SamplingSettings, logits_MV: Tensor, target_MV: Tensor | None, known: Known
) -> Tensor:
    """The probability [M] that a token of the draft is accepted, where the target is the teacher by both
    distributions (Leviathan et al. 2023, Corollary 3.6), or, without the target's logits, min(1, Q / P) of
    its token, which has the same mean. Without P, too, it is Q, whose mean is a lower bound. Greedily it is
    1 where the draft's likeliest token is the target's."""
    draft = distributions_from_logits(logits_MV, settings)
    if target_MV is not None and settings.is_random:
        target = distributions_from_logits(target_MV, settings)
        assert isinstance(draft, Dense) and isinstance(target, Dense)
        return torch.minimum(draft.probabilities_NV, target.probabilities_NV).sum(1)
    shares_M = draft.probabilities_of(known["labels"])
    if settings.is_random and "processed_logprobs" in known:
        shares_M = (shares_M / known["processed_logprobs"].exp()).clamp(max=1)
    return shares_M
