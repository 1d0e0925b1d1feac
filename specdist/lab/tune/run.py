"""The tuning job: completions, their exhaustive trace, measured costs, and replays of all candidates."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tqdm

from specdist.data.formats.prompts import open_prompts
from specdist.data.store.files import write_json
from specdist.engine.assembly import PAGE_SIZE
from specdist.engine.draft.client import Draft
from specdist.engine.engine import Engine
from specdist.engine.request import Completion, Request
from specdist.engine.schedule.stopping import StopRules
from specdist.engine.times.stats_recorder import StatsRecorder
from specdist.job.ranks.topology import topology_from_environment
from specdist.job.replica.model_plan import ModelPlan, check_goes_back, plan_models
from specdist.job.replica.plan import ReplicaPlan
from specdist.job.replica.replica import Replica, build_replica
from specdist.job.rows.row_requests import prompt_encoder
from specdist.job.texts.tokens import PromptEncoder
from specdist.job.workload import Workload
from specdist.lab.replay import ExhaustiveTrace, Oracle, ReplayResult, ReplaySettings, replay
from specdist.lab.tune.collect import TraceCollector, TracedCompletion
from specdist.lab.tune.config import TuneConfig
from specdist.lab.tune.grid import Candidate, HeadChoice, acceptance_auc, candidates, load_heads, read_heads
from specdist.models.heads.head import TokenHead
from specdist.policies.choice import build_policy
from specdist.policies.costs import CostModel
from specdist.policies.registry import TARGET_ONLY
from specdist.results.fronts import Point
from specdist.utils.errors import UserError

TRACE_FILE, COSTS_FILE = "trace.arrow", "costs.json"
# The options that a trace depends on, besides the prompts.
ORIGIN_OPTIONS = (
    "target", "draft", "split_special_tokens", "system_prompt", "chat_template_kwargs",
    "continue_final_message", "acceptance", "temperature", "top_k", "top_p", "max_new_tokens", "seed", "head",
    "target_quantization", "draft_quantization", "cache_dtype",
)  # fmt: skip

# With fewer, the batch would be half empty for much of the replay, unlike in a run.
PROMPTS_PER_ROW = 8


@dataclass(frozen=True)
class Outcome:
    """A candidate's replays, at batch size 1 and in the batch to tune for."""

    candidate: Candidate
    alone: ReplayResult
    batched: ReplayResult

    @property
    def rates(self) -> Point:
        """The batch's point in the Pareto plot."""
        return self.batched.verification_rate, self.batched.discard_rate


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """``outcomes`` are sorted by the batch's predicted tokens per second, the best first. ``oracle`` is None
    for random draws, which its theorem does not cover. ``auc``: see :func:`acceptance_auc`.
    """

    config: TuneConfig
    costs: CostModel
    num_prompts: int
    num_tokens: int
    outcomes: Sequence[Outcome]
    oracle: Outcome | None
    auc: Mapping[str, float | None]

    @property
    def best(self) -> Outcome:
        return self.outcomes[0]

    def by_head(self) -> dict[str, tuple[HeadChoice, list[Outcome]]]:
        """By path: each head and the outcomes of its policy, the best first."""
        found: dict[str, tuple[HeadChoice, list[Outcome]]] = {}
        for outcome in self.outcomes:
            head = outcome.candidate.head
            if head is not None and outcome.candidate.policy == head.policy:
                found.setdefault(head.path, (head, []))[1].append(outcome)
        return found

    def by_policy(self) -> dict[str, list[Outcome]]:
        """By policy: its outcomes, the best first; the best policy first."""
        found: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            found.setdefault(outcome.candidate.name, []).append(outcome)
        return found


def run_tuning(config: TuneConfig) -> TuningResult:
    """Collect the trace unless it exists, and replay all candidates. Raises :class:`UserError` before any
    model is loaded."""
    output = Path(config.output)
    heads = read_heads(config.head or [])
    if config.replay_only:
        trace, costs = ExhaustiveTrace.read(output / TRACE_FILE), _read_costs(output / COSTS_FILE)
        _check_origin(config, trace, output / TRACE_FILE)
    else:
        trace, costs = collect_trace(config, heads)
        output.mkdir(parents=True, exist_ok=True)
        trace.write(output / TRACE_FILE)
        write_json(output / COSTS_FILE, costs.to_json())
    batches = [_batch(config, trace, num_rows) for num_rows in (1, config.max_num_seqs)]
    outcomes = []
    for candidate in tqdm.tqdm(list(candidates(config.max_draft_tokens, heads)), "replays", disable=None):
        run_config = config.run_config(candidate.policy, **candidate.run_options)
        head = candidate.head.index if candidate.head else 0
        is_drawing = candidate.head is not None and candidate.head.info.hidden_state == "drawing"
        results = []
        for each, settings in batches:
            policy = build_policy(run_config.policy_choice, costs, is_coupled=run_config.is_coupled)
            results.append(replay(policy, each, costs, settings, head, reads_drawing_state=is_drawing))
        outcomes.append(Outcome(candidate, *results))
    is_random = config.temperature > 0 and config.acceptance == "rejection"
    oracle = [replay(Oracle(), each, costs, settings) for each, settings in batches]
    return TuningResult(
        config=config,
        costs=costs,
        num_prompts=len(trace.prompts),
        num_tokens=trace.num_tokens,
        outcomes=sorted(outcomes, key=lambda outcome: -outcome.batched.tokens_per_s),
        oracle=None if is_random else Outcome(Candidate("oracle", {}), *oracle),
        auc=acceptance_auc(trace, heads),
    )


def _batch(
    config: TuneConfig, trace: ExhaustiveTrace, num_rows: int
) -> tuple[ExhaustiveTrace, ReplaySettings]:
    """The trace, repeated so that its prompts keep the batch full for most of the time."""
    times = -(-PROMPTS_PER_ROW * num_rows // len(trace.prompts))
    return trace.repeated(times), ReplaySettings(
        max_num_seqs=num_rows, max_num_batched_tokens=config.max_num_batched_tokens, page_size=PAGE_SIZE
    )


def _check_origin(config: TuneConfig, trace: ExhaustiveTrace, path: Path) -> None:
    """Raises :class:`UserError` for a trace with other options, or with too low a cap."""
    for name in ORIGIN_OPTIONS:
        # Traces of earlier versions have no word of options that are off.
        if (trace.origin.get(name) or None) != (getattr(config, name) or None):
            raise UserError(
                f"--{name} {getattr(config, name)}, but {path} was collected with {trace.origin.get(name)}: "
                "give the same value, or leave out --replay_only"
            )
    if trace.max_draft_tokens < config.max_draft_tokens:
        raise UserError(
            f"--max_draft_tokens {config.max_draft_tokens} is more than the {trace.max_draft_tokens} of "
            f"{path}: lower it, or leave out --replay_only"
        )


def _read_costs(path: Path) -> CostModel:
    try:
        return CostModel.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}): leave out --replay_only") from error


def collect_trace(config: TuneConfig, heads: Sequence[HeadChoice]) -> tuple[ExhaustiveTrace, CostModel]:
    """Generate the calibration completions, measure the costs of passes, and trace."""
    # With goodput a replica measures its costs.
    run_config = config.run_config("goodput", max_draft_tokens=config.max_draft_tokens)
    models = plan_models(run_config)
    check_goes_back(models.draft, "jobs/tune.py drafts after every token")
    assert models.draft is not None
    networks = load_heads(heads, models.draft)
    encoder = prompt_encoder(run_config, models)
    requests = _requests(config, encoder)
    longest = max(len(request.prompt_ids) for request in requests) + config.max_new_tokens
    models = dataclasses.replace(models, max_seq_len=min(models.max_seq_len, longest))
    workload = Workload.of(
        ((len(request.prompt_ids), config.max_new_tokens) for request in requests),
        num_prompts=len(requests),
        prompts=[request.prompt_ids for request in requests] if models.has_experts else (),
    )
    replica = build_replica(
        ReplicaPlan(
            config=run_config,
            models=models,
            topology=topology_from_environment(run_config),
            workload=workload,
        )
    )
    assert replica.costs is not None
    stop_rules = StopRules(encoder.detokenizer, models.target.stop_token_ids())
    engine = _target_alone(replica, requests, stop_rules)
    completions = list(tqdm.tqdm(engine.run(), "completions", len(requests), disable=None))
    trace = _trace(config, models, replica, stop_rules, completions, networks)
    return trace, replica.costs


def _target_alone(replica: Replica, requests: Sequence[Request], stop_rules: StopRules) -> Engine:
    """Without a draft: lengths that follow measured times would let the tokens depend on them, too."""
    assembly = replica.assembly(stop_rules)
    scheduling = dataclasses.replace(assembly.scheduling, max_draft_tokens=0, num_ahead_tokens=0)
    return dataclasses.replace(assembly, scheduling=scheduling).engine(
        iter(requests), target=replica.rank0_target(), proposer=Draft(), stats_recorder=StatsRecorder()
    )


def _requests(config: TuneConfig, encoder: PromptEncoder) -> list[Request]:
    """The wanted number of prompts, spread over the file; an unusable one is replaced by a later one.

    Raises :class:`UserError` if none can be used.
    """
    run_config = config.run_config(TARGET_ONLY)
    prompts = open_prompts(
        config.prompts,
        prompt_column=run_config.prompt_column,
        messages_column=config.messages_column,
        limit=None,
    )
    prompts.check_no_batch("tuning")
    requests = [
        Request(row_id=row_id, sample_index=0, prompt_ids=prompt_ids)
        for row_id, prompt_ids in encoder.usable_prompts(prompts, range(prompts.num_rows), config.num_prompts)
    ]
    if not requests:
        raise UserError(f"--prompts {config.prompts}: none of the prompts tried is usable")
    return requests


def _trace(
    config: TuneConfig,
    models: ModelPlan,
    replica: Replica,
    stop_rules: StopRules,
    completions: Sequence[Completion],
    heads: Sequence[TokenHead],
) -> ExhaustiveTrace:
    collector = TraceCollector(*replica.runners, replica.assembly(stop_rules), heads)
    ordered = sorted(completions, key=lambda completion: completion.request.row_id)
    origin = {name: getattr(config, name) for name in ORIGIN_OPTIONS}
    return ExhaustiveTrace(
        [
            collector.collect(
                TracedCompletion(
                    row_id=completion.request.row_id,
                    prompt_ids=completion.request.prompt_ids,
                    completion_ids=completion.token_ids,
                    max_new_tokens=min(
                        config.max_new_tokens, models.max_seq_len - len(completion.request.prompt_ids)
                    ),
                )
            )
            for completion in tqdm.tqdm(ordered, "traces", disable=None)
        ],
        origin,
    )
