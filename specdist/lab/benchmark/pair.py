"""Target and draft, loaded once: transformers and specdist run the same weights in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from specdist.config.generate import GenerateConfig
from specdist.engine.assembly import PAGE_SIZE, Assembly
from specdist.engine.engine import Engine
from specdist.engine.messages.interfaces import Proposer
from specdist.engine.request import Request
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.plan import SchedulerSettings
from specdist.engine.schedule.stopping import StopRules
from specdist.engine.times.timeline import Kind, Timeline, clock_of
from specdist.job.costs.measuring import measure_costs
from specdist.job.models.model_plan import plan_models
from specdist.job.ranks.topology import Topology
from specdist.job.run.workload import Workload
from specdist.job.texts.tokens import PromptEncoder, load_tokenizer
from specdist.llm import NO_PATH
from specdist.models.attention.rope import recomputed_from, rope_borders
from specdist.models.families.adapters import use_paged_attention, use_transformers_attention
from specdist.models.files.checkpoint import Checkpoint, keeps_states
from specdist.models.loading.loading import load_whole
from specdist.models.passes.runner import ModelRunner
from specdist.policies import LengthPolicy
from specdist.policies.choice import PolicyChoice, build_policy
from specdist.policies.costs import CostModel
from specdist.policies.registry import uses_features
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.errors import UserError

MAX_NUM_BATCHED_TOKENS = 2048


def fixed_length(num_draft_tokens: int) -> PolicyChoice:
    """Always this many draft tokens; 0 for the target alone."""
    return PolicyChoice.of("fixed", num_draft_tokens=num_draft_tokens) if num_draft_tokens else PolicyChoice()


@dataclass(frozen=True, kw_only=True)
class DraftOrder:
    """The draft of one engine.

    Attributes:
        choice: its length policy; every engine gets a new policy object.
        costs: for a policy that uses them.
    """

    num_slots: int
    choice: PolicyChoice
    costs: CostModel | None = None

    def assembly(self, largest: Assembly) -> Assembly:
        """The assembly of this engine, from the one whose caches have room for every order."""
        scheduling = dataclasses.replace(
            largest.scheduling, max_num_seqs=self.num_slots, max_draft_tokens=self.choice.max_draft_tokens
        )
        return dataclasses.replace(largest, scheduling=scheduling)

    def policy(self, settings: SamplingSettings) -> LengthPolicy:
        """A new policy object, which has learned nothing yet."""
        return build_policy(self.choice, self.costs, is_coupled=not settings.is_random)

    def timeline(self, rest: Kind, device: torch.device) -> Timeline:
        """The timeline of one side; ``rest`` is the kind of time outside all phases."""
        return Timeline(rest, clock=clock_of(device))


class Pair:
    """Both models on one device. Raises :class:`UserError` for a pair that the job would refuse.

    Args:
        options: more of the job's: ``dtype``, ``model_impl``, ``target_quantization``, and so on.
    """

    def __init__(self, target: str, draft: str, *, device: torch.device, **options: Any) -> None:
        # Every call of generate() would repeat its remarks on the options.
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        config = GenerateConfig(prompts=NO_PATH, output=NO_PATH, target=target, draft=draft, **options)
        models = plan_models(config)
        assert models.draft is not None
        self.target_checkpoint, self.draft_checkpoint = models.target, models.draft
        self.vocab_size = models.vocab_size
        # Longest prompt plus completion.
        self.max_positions = models.max_seq_len
        self.stop_token_ids = self.target_checkpoint.stop_token_ids()
        self.device = device
        self.model_impl = config.model_impl
        self.target = _load(self.target_checkpoint, config.dtype, device)
        self.draft = _load(self.draft_checkpoint, config.dtype, device)
        self.tokenizer = load_tokenizer(self.target_checkpoint)

    @property
    def dtype(self) -> str:
        """Type of the target's weights, as options spell it."""
        return str(self.target.dtype).removeprefix("torch.")

    def use_specdist_attention(self) -> None:
        """Make the models run in specdist's engine."""
        for model in (self.target, self.draft):
            use_paged_attention(model)

    def use_transformers_attention(self) -> None:
        """Make the models run in transformers, with the attention that it would choose."""
        for model in (self.target, self.draft):
            use_transformers_attention(model)


class PagedPair:
    """The pair in specdist's engine, with caches for the largest batch and engines for any smaller one.

    Unlike :class:`specdist.job.replica.replica.Replica` it serves several batch sizes, so that all methods
    share the weights, and it takes only the memory that they need.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        max_num_seqs: int,
        max_seq_len: int,
        max_draft_tokens: int,
        settings: SamplingSettings,
        seed: int,
        num_context_tokens: int = 0,
        text_ids: tuple[int, ...] = (),
    ) -> None:
        """``num_context_tokens``: context length at which passes are timed; ``text_ids``: of the rows, with
        which they are timed where that matters."""
        self.pair = pair
        self.num_context_tokens = num_context_tokens
        has_experts = pair.target_checkpoint.has_experts or pair.draft_checkpoint.has_experts
        self._text_ids = text_ids if has_experts else ()
        # Room for the longest text of every row, a block and the tokens ahead of it: no row is ever
        # preempted or kept waiting.
        pages_per_row = -(-max_seq_len // PAGE_SIZE) + -(-2 * (max_draft_tokens + 1) // PAGE_SIZE) + 1
        encoder = PromptEncoder(pair.tokenizer, max_prompt_tokens=max_seq_len - 1)
        self.assembly = Assembly(
            settings=settings,
            vocab_size=pair.vocab_size,
            stop_rules=StopRules(encoder.detokenizer, frozenset(pair.stop_token_ids)),
            scheduling=SchedulerSettings(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max(MAX_NUM_BATCHED_TOKENS, max_num_seqs * (max_draft_tokens + 1)),
                max_draft_tokens=max_draft_tokens,
                max_new_tokens=max_seq_len,
                max_seq_len=max_seq_len,
                seed=seed,
                rope_borders=rope_borders(pair.target.config, pair.draft.config),
                recomputed_from=recomputed_from(pair.target.config),
                target_keeps_states=keeps_states(pair.target.config),
                draft_keeps_states=keeps_states(pair.draft.config),
            ),
            num_pages=max_num_seqs * pages_per_row,
            max_cache_len=pages_per_row * PAGE_SIZE,
        )
        pair.use_specdist_attention()
        impl = pair.model_impl
        self.target, self.draft = (
            ModelRunner(model, pair.device, model_impl=impl) for model in (pair.target, pair.draft)
        )
        self.assembly.allocate(self.target)
        self.assembly.allocate_draft(self.draft)

    @property
    def settings(self) -> SamplingSettings:
        return self.assembly.settings

    def engine(
        self, requests: Sequence[Request], order: DraftOrder, proposer: Proposer
    ) -> tuple[Engine, StatsRecorder]:
        """A new engine over these requests for a proposer that follows the order, and its statistics."""
        recorder = StatsRecorder()
        assembly = order.assembly(self.assembly)
        target, clock = assembly.local_target(self.target), order.timeline("host", self.pair.device)
        engine = assembly.engine(
            iter(requests), target=target, proposer=proposer, stats_recorder=recorder, clock=clock
        )
        return engine, recorder

    def local_draft(self, order: DraftOrder) -> Proposer:
        """The draft in this process."""
        clock = order.timeline("idle", self.pair.device)
        return order.assembly(self.assembly).local_draft(self.draft, order.policy(self.settings), clock)

    def costs(self, order: DraftOrder) -> CostModel:
        """Of both models in this process, as the main job would measure them for this order's policy."""
        self.pair.use_specdist_attention()
        return measure_costs(
            order.assembly(self.assembly),
            Topology(rank=0, world_size=1, tp_size=1, uses_draft=True, device=self.pair.device),
            Workload(
                num_rows=order.num_slots,
                num_context_tokens=self.num_context_tokens,
                text_ids=self._text_ids,
            ),
            target=self.target,
            draft=self.draft,
            group=None,
            num_branch_slots=0,
            uses_features=uses_features(order.choice.policy),
            asks_draft=False,
        )


def _load(checkpoint: Checkpoint, dtype: str, device: torch.device) -> PreTrainedModel:
    try:
        model = load_whole(checkpoint, dtype=checkpoint.torch_dtype(dtype), device=device)
    except torch.OutOfMemoryError as error:
        raise UserError(f"{checkpoint.option} {checkpoint.name} does not fit on {device}: {error}") from error
    # A checkpoint's own sampling settings would be added to those of the benchmark.
    model.generation_config = GenerationConfig()
    return model
