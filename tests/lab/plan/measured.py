"""A pair whose engine is built for one batch size and draft length after another, on the same weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from specdist.config.generate import GenerateConfig
from specdist.data.stats.shard import Stats
from specdist.engine.assembly import PAGE_SIZE, Assembly
from specdist.engine.request import Request
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.plan import SchedulerSettings
from specdist.engine.schedule.stopping import StopRules
from specdist.job.models.model_plan import plan_models
from specdist.job.texts.tokens import PromptEncoder, load_tokenizer
from specdist.llm import NO_PATH
from specdist.models.attention.rope import recomputed_from, rope_borders
from specdist.models.families.adapters import use_paged_attention
from specdist.models.files.checkpoint import Checkpoint, keeps_states
from specdist.models.loading.loading import load_whole
from specdist.models.passes.runner import ModelRunner
from specdist.policies.choice import PolicyChoice, build_policy
from specdist.sampling.distributions import SamplingSettings

MAX_NUM_BATCHED_TOKENS = 2048


@dataclass(frozen=True)
class Row:
    """One completion to generate."""

    prompt_ids: list[int]
    max_new_tokens: int


@dataclass(frozen=True)
class Generated:
    """Token ids per row, in the order of the rows; the statistics; and of each row the blocks that were
    verified and the draft tokens accepted in them."""

    completions: list[list[int]]
    stats: Stats
    accepted: list[tuple[int, int]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.completions))


class MeasuredPair:
    """Both models on one device, with caches for the largest batch. Raises :class:`UserError` for a pair that
    the job would refuse.

    Args:
        options: more of the job's: ``dtype``, ``trust_remote_code``, ``allow_pickle``.
    """

    def __init__(
        self,
        target: str,
        draft: str,
        *,
        device: torch.device,
        max_num_seqs: int,
        max_seq_len: int,
        max_draft_tokens: int,
        **options: Any,
    ) -> None:
        config = GenerateConfig(prompts=NO_PATH, output=NO_PATH, target=target, draft=draft, **options)
        models = plan_models(config)
        assert models.draft is not None
        self.device = device
        self.vocab_size = models.vocab_size
        self.settings = SamplingSettings(temperature=0.0)
        target_model, draft_model = (
            _load(model, config.dtype, device) for model in (models.target, models.draft)
        )
        encoder = PromptEncoder(load_tokenizer(models.target), max_prompt_tokens=max_seq_len - 1)
        # Room for the longest text of every row and a block: no row is ever preempted or kept waiting.
        pages_per_row = -(-max_seq_len // PAGE_SIZE) + -(-2 * (max_draft_tokens + 1) // PAGE_SIZE) + 1
        self._assembly = Assembly(
            settings=self.settings,
            vocab_size=models.vocab_size,
            stop_rules=StopRules(encoder.detokenizer, frozenset(models.target.stop_token_ids())),
            scheduling=SchedulerSettings(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max(MAX_NUM_BATCHED_TOKENS, max_num_seqs * (max_draft_tokens + 1)),
                max_draft_tokens=max_draft_tokens,
                max_new_tokens=max_seq_len,
                max_seq_len=max_seq_len,
                seed=0,
                rope_borders=rope_borders(target_model.config, draft_model.config),
                recomputed_from=recomputed_from(target_model.config),
                target_keeps_states=keeps_states(target_model.config),
                draft_keeps_states=keeps_states(draft_model.config),
            ),
            num_pages=max_num_seqs * pages_per_row,
            max_cache_len=pages_per_row * PAGE_SIZE,
        )
        self.target, self.draft = (
            ModelRunner(model, device, model_impl=config.model_impl) for model in (target_model, draft_model)
        )
        self._assembly.allocate(self.target)
        self._assembly.allocate_draft(self.draft)

    def generate(self, rows: Sequence[Row], *, num_slots: int, num_draft_tokens: int) -> Generated:
        """With always so many draft tokens, in an engine of so many sequences at a time; 0 for the target
        alone."""
        choice = PolicyChoice()
        if num_draft_tokens:
            choice = PolicyChoice.of("fixed", num_draft_tokens=num_draft_tokens)
        scheduling = dataclasses.replace(
            self._assembly.scheduling, max_num_seqs=num_slots, max_draft_tokens=choice.max_draft_tokens
        )
        assembly = dataclasses.replace(self._assembly, scheduling=scheduling)
        recorder = StatsRecorder()
        engine = assembly.engine(
            (Request(row_id=index, sample_index=0, **vars(row)) for index, row in enumerate(rows)),
            target=assembly.local_target(self.target),
            proposer=assembly.local_draft(self.draft, build_policy(choice, None, is_coupled=True)),
            stats_recorder=recorder,
        )
        finished = {completion.request.row_id: completion for completion in engine.run()}
        ordered = [finished[index] for index in range(len(rows))]
        return Generated(
            [completion.token_ids for completion in ordered],
            recorder.close_shard(0),
            [(completion.num_spec_steps, completion.num_accepted_draft_tokens) for completion in ordered],
        )


def _load(checkpoint: Checkpoint, dtype: str, device: torch.device) -> PreTrainedModel:
    model = load_whole(checkpoint, dtype=checkpoint.torch_dtype(dtype), device=device)
    use_paged_attention(model)
    return model
